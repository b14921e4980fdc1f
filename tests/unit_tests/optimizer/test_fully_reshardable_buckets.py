"""Fully reshardable state when gradient buckets end in padding."""

import itertools

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from tests.cpu_megatron.session import Training, distributed_optimizer, gpt, model_parallel
from tests.cpu_megatron.whole_checkpoint import read_tensors


def test_every_parameter_is_stored_under_its_own_key(tmp_path):
    with model_parallel():
        # A size that isn't a multiple of the padding's 128 elements.
        model = gpt(ffn_hidden_size=68)
        run = Training.start(model, distributed_optimizer(), bucket_size=3000)
        run.train(2)
        buckets = run.model[0].buffers[0].buckets
        assert len(buckets) > 2
        assert any(bucket.numel_unpadded % 128 for bucket in buckets[:-1])
        run.save(tmp_path / 'saved')
        moments = run.optimizer.chained_optimizers[0].optimizer.state.values()
        saved = read_tensors(tmp_path / 'saved')
    weights = [key for key in saved if not key.startswith('optimizer.')]
    for key in weights:
        # In fp32 the main parameters are the weights.
        assert torch.equal(saved[f'optimizer.state.param.{key}'], saved[key]), key
    stored = torch.cat([saved[f'optimizer.state.exp_avg.{key}'].flatten() for key in weights])
    live = torch.cat([state['exp_avg'].flatten() for state in moments])
    assert torch.equal(stored.sort().values, live.sort().values)


STOCK_CUT = distrib_optimizer.upstream.DistributedOptimizer.sharded_param_state_fully_reshardable


@pytest.mark.skipif(
    'buckets' in STOCK_CUT.__code__.co_names, reason='from 0.20 on megatron-core loses nothing here'
)
def test_what_stock_shifts_it_loses_in_part(tmp_path, monkeypatch):
    """So a file with state in others' places can't be mended: some of it is in none."""
    monkeypatch.setattr(distrib_optimizer, '_insert_bucket_padding', lambda *arguments: None)
    with model_parallel():
        run = Training.start(gpt(ffn_hidden_size=68), distributed_optimizer(), bucket_size=3000)
        run.train(1)
        number = itertools.count(1)
        for state in run.optimizer.chained_optimizers[0].optimizer.state.values():
            moment = state['exp_avg']
            own = [next(number) for _ in range(moment.numel())]
            moment.copy_(torch.tensor(own, dtype=torch.float32).view(moment.shape))
        buckets = run.model[0].buffers[0].buckets
        gaps = [-bucket.numel_unpadded % 128 for bucket in buckets[:-1]]
        run.save(tmp_path / 'saved')
        saved = read_tensors(tmp_path / 'saved')
    moments = [saved[key].flatten() for key in saved if key.startswith('optimizer.state.exp_avg.')]
    lost = set(range(1, next(number))) - set(torch.cat(moments).tolist())
    assert len(lost) >= next(gap for gap in gaps if gap) > 0
