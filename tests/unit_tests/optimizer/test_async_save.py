"""Checkpoints that are written while training goes on."""

import json

import torch

from tests.cpu_megatron import warm
from tests.unit_tests.optimizer.resume_runs import read_records

ARGUMENTS = [
    *('--bf16', '--use-distributed-optimizer', '--use-precision-aware-optimizer'),
    *('--optimizer-cpu-offload', '--optimizer-offload-fraction', '0.5'),
    *('--async-save', '--use-persistent-ckpt-worker', '--async-strategy', 'mcore'),
]


def test_what_the_next_steps_change_in_host_memory_is_not_what_is_written(tmp_path):
    save = ['--save', str(tmp_path / 'checkpoints'), '--save-interval', '3']
    load = ['--load', str(tmp_path / 'checkpoints')]
    for name, arguments in (('whole', save), ('rest', load)):
        task = {'kind': 'gpt', 'arguments': ARGUMENTS + arguments, 'result': str(tmp_path / name)}
        file = tmp_path / f'{name}.json'
        file.write_text(json.dumps([task]))
        warm.run(1, 'tests.unit_tests.optimizer.late_writes', str(file))
    (whole,), (rest,) = read_records(tmp_path / 'whole'), read_records(tmp_path / 'rest')
    assert [step['iteration'] for step in rest['steps']] == [4, 5, 6]
    assert rest['steps'] == whole['steps'][3:]
    assert rest['optimizer'].keys() == whole['optimizer'].keys()
    for key, value in whole['optimizer'].items():
        assert torch.equal(value, rest['optimizer'][key]), key
