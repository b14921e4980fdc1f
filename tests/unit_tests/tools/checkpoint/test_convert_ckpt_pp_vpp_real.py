"""Runs of real Megatron code on converted checkpoints take the step that the source would take."""

import functools
import shutil

import pytest

from tests.unit_tests.tools.checkpoint.pp_vpp_files import TRACKER, load, same, save
from tests.unit_tests.tools.checkpoint.pp_vpp_runs import differences, records, run
from tools.checkpoint.convert_ckpt_pp_vpp import main

PP2 = '--pipeline-model-parallel-size 2'
PP4 = '--pipeline-model-parallel-size 4'
TP2 = '--tensor-model-parallel-size 2'
VPP = '--num-layers-per-virtual-pipeline-stage 1'
UNTIED = '--untie-embeddings-and-output-weights'
MOE = (
    '--num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --moe-router-topk 2 '
    '--global-batch-size 8'
)


# name: ranks and arguments of both runs, of the source, conversion, ranks and arguments of the
# converted run, optimizer
CASES = {
    'merge: PP 4 to PP 2 x VPP 2, bf16, tied': (
        '--num-layers 4 --bf16',
        4,
        PP4,
        'merge --pipeline-size 2',
        2,
        f'{PP2} {VPP}',
        'torch_adam',
    ),
    'merge: fp32, untied, FusedAdam': (
        f'--num-layers 4 {UNTIED}',
        4,
        PP4,
        'merge --pipeline-size 2',
        2,
        f'{PP2} {VPP}',
        'fused_adam',
    ),
    'merge: uneven stages': (
        '--num-layers 6 --bf16',
        4,
        f'{PP4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1',
        'merge --pipeline-size 2',
        2,
        f'{PP2} --pipeline-model-parallel-layout Et|tt|tt|tL',
        'fused_adam',
    ),
    'split: PP 2 x VPP 2 to PP 4, fp32, tied': (
        '--num-layers 4',
        2,
        f'{PP2} {VPP}',
        'split',
        4,
        PP4,
        'torch_adam',
    ),
    'split: bf16, untied, FusedAdam': (
        f'--num-layers 4 --bf16 {UNTIED}',
        2,
        f'{PP2} {VPP}',
        'split',
        4,
        PP4,
        'fused_adam',
    ),
    'reshape: adds VPP to a running job, TP 2, bf16, FusedAdam': (
        f'--num-layers 4 --bf16 {TP2}',
        4,
        PP2,
        'reshape --pipeline-size 2 --virtual-size 2',
        4,
        f'{PP2} {VPP}',
        'fused_adam',
    ),
    'reshape: layers per chunk, some without layers, fp32': (
        '--num-layers 6',
        2,
        PP2,
        'reshape --pipeline-size 2 --virtual-size 3 --layers-per-chunk 0,3,0,2,1,0',
        2,
        f'{PP2} --pipeline-model-parallel-layout E|ttt||tt|t|L',
        'torch_adam',
    ),
    'reshape: VPP to fewer, larger stages': (
        '--num-layers 4',
        2,
        f'{PP2} {VPP}',
        'reshape --pipeline-size 2 --virtual-size 1',
        2,
        PP2,
        'torch_adam',
    ),
    'reshape: to a single stage, untied': (
        f'--num-layers 4 --bf16 {UNTIED}',
        2,
        f'{PP2} {VPP}',
        'reshape --pipeline-size 1 --virtual-size 1',
        1,
        '',
        'fused_adam',
    ),
    'reshape: from a single stage, untied': (
        f'--num-layers 4 --bf16 {UNTIED}',
        1,
        '',
        'reshape --pipeline-size 2 --virtual-size 2',
        2,
        f'{PP2} {VPP}',
        'fused_adam',
    ),
    'reshape: experts over two ranks, chained optimizers': (
        f'--num-layers 4 --bf16 {MOE}',
        4,
        PP2,
        'reshape --pipeline-size 2 --virtual-size 2',
        4,
        f'{PP2} {VPP}',
        'torch_adam',
    ),
    'merge: hybrid model': (
        '--hybrid-layer-pattern M-|*-|M*|-- --mamba-head-dim 4',
        4,
        PP4,
        'merge --pipeline-size 2',
        2,
        PP2,
        'fused_adam',
    ),
    'merge: multi-token prediction, tied': (
        '--num-layers 4 --bf16 --mtp-num-layers 1',
        4,
        PP4,
        'merge --pipeline-size 2',
        2,
        f'{PP2} {VPP}',
        'fused_adam',
    ),
    'split: a stage without layers': (
        '--num-layers 4 --bf16',
        2,
        f'{PP2} --pipeline-model-parallel-layout Ett||t|tL',
        'split',
        4,
        f'{PP4} --pipeline-model-parallel-layout Ett||t|tL',
        'torch_adam',
    ),
    'reshape: multi-token prediction, untied': (
        f'--num-layers 4 --mtp-num-layers 1 {UNTIED}',
        2,
        PP2,
        'reshape --pipeline-size 2 --virtual-size 2',
        2,
        f'{PP2} {VPP}',
        'torch_adam',
    ),
    'split: without optimizer': (
        '--num-layers 4 --bf16 --no-save-optim --no-load-optim',
        2,
        f'{PP2} {VPP}',
        'split',
        4,
        PP4,
        'torch_adam',
    ),
    'split: fp16 with a loss scale': (
        '--num-layers 4 --fp16 --initial-loss-scale 256',
        2,
        f'{PP2} {VPP}',
        'split',
        4,
        PP4,
        'torch_adam',
    ),
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A checkpoint after two steps, and the record of the third; each is made once."""

    @functools.cache
    def train(ranks, arguments, optimizer, kind):
        root = tmp_path_factory.mktemp('trained')
        source, record = root / 'source', root / 'record'
        go = functools.partial(run, ranks, arguments, optimizer=optimizer, kind=kind)
        if '--no-save-optim' in arguments:  # the third step is that of a fresh optimizer
            go(f'--save {source} --exit-interval 2')
            go(f'--load {source} --exit-interval 3', record=record)
        else:
            go(f'--save {source} --save-interval 2 --exit-interval 3', record=record)
        return source, records(record)

    return train


@pytest.mark.parametrize('name', CASES)
def test_converted_run_takes_the_same_step(name, trained, tmp_path):
    shared, ranks, layout, conversion, new_ranks, new_layout, optimizer = CASES[name]
    kind = 'hybrid' if 'hybrid' in name else 'gpt'
    source, expected = trained(ranks, f'{shared} {layout}', optimizer, kind)
    converted = tmp_path / 'converted'
    words = f'{conversion} --load-dir {source} --save-dir {converted} --iteration 2'
    assert main(words.split()) == 0
    load_it = f'--load {converted} --exit-interval 3'
    run(
        new_ranks,
        shared,
        new_layout,
        load_it,
        record=tmp_path / 'found',
        optimizer=optimizer,
        kind=kind,
    )
    expected, found = dict(expected), records(tmp_path / 'found')
    # Megatron adds the squared norms of a rank's gradients up before it adds those of the ranks:
    # another layout sums the same numbers in another order. All else is the same bit for bit.
    norms = expected.pop(('grad norm', '')), found.pop(('grad norm', ''))
    assert norms[0] == pytest.approx(norms[1], rel=2**-21)
    assert differences(expected, found) == []
    assert sum(kind == 'grads' for kind, _ in expected) > 30
    assert any('.mtp.' in key for _, key in expected) == ('multi-token' in name)
    assert any(kind == 'loss' for kind, _ in expected)


def test_wrong_routing_would_not_pass(trained, tmp_path):
    """The comparison above sees two layers of a chunk exchanged."""
    arguments = f'--num-layers 4 {PP2} {VPP}'
    source, expected = trained(2, arguments, 'torch_adam', 'gpt')
    wrong = shutil.copytree(source, tmp_path / 'wrong')
    (wrong / TRACKER).write_text('2')
    state = load(wrong, '00_000')
    state['model0'], state['model1'] = (
        {**state[chunk], **{key: value for key, value in state[other].items() if 'layers.' in key}}
        for chunk, other in (('model0', 'model1'), ('model1', 'model0'))
    )
    save(state, wrong, '00_000')
    run(2, arguments, f'--load {wrong} --exit-interval 3', record=tmp_path / 'found')
    assert differences(expected, records(tmp_path / 'found'))


def test_tied_head_becomes_one_tensor_and_two_again(tmp_path):
    """Gradients of the two uses add up in another order on one stage, so files are compared."""
    run(2, '--num-layers 4 --bf16', PP2, f'--save {tmp_path}/two --exit-interval 2')
    reshape = 'reshape --virtual-size 1'
    two_to_one = f'--load-dir {tmp_path}/two --save-dir {tmp_path}/one'
    assert main(f'{reshape} --pipeline-size 1 {two_to_one}'.split()) == 0
    one = load(tmp_path / 'one', '00')
    assert 'output_layer.weight' not in one['model']
    run(1, '--num-layers 4 --bf16', f'--load {tmp_path}/one --exit-interval 3')  # strict
    one_to_two = f'--load-dir {tmp_path}/one --save-dir {tmp_path}/again'
    assert main(f'{reshape} --pipeline-size 2 {one_to_two}'.split()) == 0
    for rank in ('00_000', '00_001'):
        before, after = (load(tmp_path / root, rank) for root in ('two', 'again'))
        for key in ('model', 'optimizer'):
            assert same(before[key], after[key]) == []
            assert list(before['model']) == list(after['model'])
