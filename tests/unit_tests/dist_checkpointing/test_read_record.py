"""That what a load was asked for came from storage."""

import dataclasses
import re

import pytest
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as interop
from megatron.core.dist_checkpointing.checkpoint_layout import check_sources, read_checkpoint_layout
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.read_record import recording_reads
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

from tests.cpu_megatron.session import Training, distributed_optimizer, hybrid, model_parallel
from tests.unit_tests.dist_checkpointing.gpt_runs import save_gpt


@pytest.mark.parametrize(
    'key',
    [
        'decoder.layers.mlp.linear_fc2.weight',
        'optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.weight',
    ],
)
def test_an_entry_that_the_load_skips_is_missed_after_it(key, tmp_path, monkeypatch):
    save_gpt(tmp_path / 'gpt')
    layout = read_checkpoint_layout(str(tmp_path / 'gpt'))
    maps = interop.gpt_compatible_layer_maps('M*-*-', layout)
    plan_everything = MCoreLoadPlanner.create_local_plan

    def skip(planner):
        plan = plan_everything(planner)
        items = [
            item
            for item in plan.items
            if (item.dest_index.fqn, tuple(item.dest_index.offset or ())[:1]) != (key, (1,))
        ]
        return dataclasses.replace(plan, items=items)

    with model_parallel(seed=99):
        run = Training.start(hybrid('M*-*-'), distributed_optimizer())

        def load():
            def prepare(state):
                parts = {part: state[part] for part in ('model', 'optimizer')}
                for part in parts.values():
                    interop.retarget_sharded_state_dict_to_gpt_checkpoint(part, maps)
                record.requested.update(check_sources(parts, layout))
                return state

            with recording_reads({}) as record:
                run.load(tmp_path / 'gpt', prepare)
            return record

        load().check()
        monkeypatch.setattr(MCoreLoadPlanner, 'create_local_plan', skip)
        record = load()
        with pytest.raises(CheckpointingException, match=rf'{re.escape(key)} \(from \[1, 0, 0\]\)'):
            record.check()
