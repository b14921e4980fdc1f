"""Fully reshardable state when gradient buckets end in padding."""

import torch

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
