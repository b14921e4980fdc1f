"""Runs whose optimizer has state for some layers of a stack only, each saved and loaded.

    python -m tests.unit_tests.optimizer.partly_frozen RESULTS

With one or two ranks; RESULTS.<rank> gets for each case of :data:`CASES` what a save and a load
ended with. Loaded is what was saved, or, where that was refused, what a run saved that froze
nothing.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit_tests.optimizer.fact_runs import (
    FORMATS,
    equal,
    model_parallel,
    model_state,
    optimizer_state,
    start,
)

FULLY, IN_BUCKETS = FORMATS
MOE = {'num_moe_experts': 4}
# Ranks, parallel sizes, settings of the model, what is in the names of what is trained.
CASES = {
    'one bias': (1, {}, {}, ('layers.1.mlp.linear_fc2.bias',)),
    'whole stack': (1, {}, {}, ('mlp.linear_fc2.bias',)),
    'one bias, DP': (2, {}, {}, ('layers.1.mlp.linear_fc2.bias',)),
    'one weight, TP': (2, {'tensor': 2}, {}, ('layers.0.mlp.linear_fc1.weight',)),
    'gated': (1, {}, {'gated_linear_unit': True}, ('layers.0.mlp.linear_fc1.weight',)),
    'whole stage': (2, {'pipeline': 2}, {'num_layers': 4}, ('layers.',)),
    'router': (2, {'expert': 2}, MOE, ('layers.1.mlp.router.weight',)),
    'experts of a layer': (2, {'expert': 2}, MOE, ('final_layernorm', 'layers.1.mlp.experts')),
    'one local expert': (2, {'expert': 2}, MOE, ('final_layernorm', 'local_experts.1.')),
}


def frozen(case: str, trained: tuple[str, ...]):
    """What leaves the parameters with those names to train; the last stage has none."""
    rank = dist.get_rank()

    def freeze(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad = any(part in name for part in trained)
            if case == 'whole stage' and rank == 1:
                param.requires_grad = False

    return freeze


def outcome(run) -> str:
    """Empty where it works; else the error."""
    try:
        run()
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return ''


def main() -> None:
    """Do the cases that have as many ranks as this run."""
    results = {}
    for name, (ranks, parallel, model, trained) in CASES.items():
        if ranks != int(os.environ.get('WORLD_SIZE', 1)):
            continue
        for kind in FORMATS:
            results[f'{name} {kind}'] = one_case(name, kind, parallel, model, trained)
    Path(f'{sys.argv[1]}.{os.environ.get("RANK", 0)}').write_text(json.dumps(results))


def one_case(name: str, kind: str, parallel: dict, model: dict, trained: tuple[str, ...]) -> dict:
    """What saving and loading in one format end with."""
    path = Path(f'{sys.argv[1]}.{name}.{kind}')
    found = {}
    with model_parallel(**parallel):
        whole = start(model=model)
        whole.train(1 if model is not MOE else 0)  # experts train on a GPU only
        whole.save(path / 'whole', kind)
    with model_parallel(**parallel):
        run = start(model=model, prepare_model=frozen(name, trained))
        run.train(1 if model is not MOE else 0)
        found['save'] = outcome(lambda: run.save(path / 'part', kind))
        dist.barrier()
        found['left'] = [file.name for file in (path / 'part').iterdir()]
        if kind == FULLY or not found['save']:
            source = path / ('part' if not found['save'] else 'whole')
            rest = start(model=model, prepare_model=frozen(name, trained))
            found['load'] = outcome(lambda: rest.load(source))
            if source.name == 'part' and not found['load']:
                equal(optimizer_state(run.optimizer), optimizer_state(rest.optimizer))
                equal(model_state(run.model), model_state(rest.model))
        dist.barrier()
    return found


if __name__ == '__main__':
    main()
