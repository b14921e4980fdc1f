"""One rank of a tiny GPT training under megatron-core 0.10 to 0.15, on the CPU.

    python -m tests.old_formats.train LOG [megatron arguments]

The path begins with a source tree of that release. ``LOG`` gets one JSON line an iteration: its
loss and gradient norm, as hexadecimal floats. Options of a tiny run are added where they
aren't given.
"""

import functools
import json
import os
import sys
import types
from pathlib import Path
from unittest import mock

import numpy
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms

from tests.cpu_megatron import collectives, facade, fused_adam_convention, hooks
from tests.cpu_megatron.arguments import GPT_DEFAULTS


def main() -> None:
    """Train as the command line says."""
    log, *given = sys.argv[1:]
    facade.install()
    collectives.install()
    hooks.AFTER_IMPORT |= {
        # instead of the other hook: these releases write in processes of their own, which answer
        # through the real queue
        'megatron.core.dist_checkpointing.strategies.filesystem_async': _writes_torch_save,
        'megatron.core.fp8_utils': _no_fp8_parameters,
        'megatron.core.transformer.moe.moe_utils': _no_te_gemm,
    }
    hooks.install()
    if os.environ.get('CPU_MEGATRON_OPTIMIZER') == 'fused_adam':
        fused_adam_convention.install()
    numpy.product = numpy.prod  # gone from NumPy 2
    # the real one wants packages for tokenizers that nobody asks for here
    tokenizer = types.ModuleType('megatron.training.tokenizer')
    tokenizer.build_tokenizer = _build_tokenizer
    sys.modules[tokenizer.__name__] = tokenizer
    names = {argument.split('=', 1)[0] for argument in given}
    if _release() < (0, 11):
        names.add('--attention-backend')  # not known then
    added = [
        part
        for name, value in GPT_DEFAULTS.items()
        if name not in names
        for part in ([name] if value is None else [name, value])
    ]
    with mock.patch.object(sys, 'argv', [sys.argv[0], *added, *given]):
        _pretrain(Path(log))


def _release() -> tuple[int, ...]:
    from megatron import core

    return tuple(map(int, core.__version__.split('.')[:2]))


def _no_fp8_parameters(module: types.ModuleType) -> None:
    # without Transformer Engine 0.12 raises even where there are none
    module._quantize_param_shard_impl = lambda *args: None


def _writes_torch_save(module: types.ModuleType) -> None:
    # the only format that torch's function had when 0.12 called it; 0.10 knew of no transforms
    known = () if hasattr(module, '_StorageWriterTransforms') else (_StorageWriterTransforms(),)
    form = SerializationFormat.TORCH_SAVE
    module._write_item = functools.partial(module._write_item, *known, serialization_format=form)


def _no_te_gemm(module: types.ModuleType) -> None:
    # 0.14 asks whether it is there by a name that it defines with Transformer Engine only
    module.te_general_gemm = getattr(module, 'te_general_gemm', None)


def _build_tokenizer(args) -> types.SimpleNamespace:
    args.padded_vocab_size = args.vocab_size
    return types.SimpleNamespace(vocab_size=args.vocab_size)


def _pretrain(log: Path) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import training

    from tests.cpu_megatron.synthetic_data import datasets_from_args

    steps: list[dict] = []
    train_step = training.train_step

    def recorded(*args, **kwargs):
        result = train_step(*args, **kwargs)
        losses, norm = result[0], result[-2]
        steps.append({name: float(value).hex() for name, value in losses.items()})
        steps[-1]['grad norm'] = float(norm).hex()
        if losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            log.write_text(''.join(json.dumps(step) + '\n' for step in steps))
        return result

    def untrained(*args, **kwargs):
        return training.get_args().iteration, 0

    patches = {'train_step': recorded}
    if '--cpu-only-save' in sys.argv:
        sys.argv.remove('--cpu-only-save')
        patches['train'] = untrained
    with mock.patch.multiple(training, **patches):
        training.pretrain(
            datasets_from_args,
            _model,
            ModelType.encoder_or_decoder,
            _forward_step,
        )


def _forward_step(iterator, model):
    from megatron.core import parallel_state

    from tests.cpu_megatron.synthetic_data import forward_step

    output, loss_func = forward_step(iterator, model)
    if _release() > (0, 12):
        return output, loss_func

    def as_pair(output):
        # there the report is of all ranks already, a sum and its number of tokens
        loss, tokens, report = loss_func(output)
        for pair in report.values():
            torch.distributed.all_reduce(pair, group=parallel_state.get_data_parallel_group())
        return loss, tokens, {name: tuple(pair) for name, pair in report.items()}

    return output, as_pair


def _model(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec()
    return GPTModel(
        config,
        spec,
        **({} if vp_stage is None else {'vp_stage': vp_stage}),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


if __name__ == '__main__':
    main()
