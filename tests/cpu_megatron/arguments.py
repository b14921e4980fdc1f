"""Megatron arguments of a tiny run, where the caller gave none."""

import tests.cpu_megatron as cpu_megatron

GPT_DEFAULTS = {
    '--num-layers': '2',
    '--hidden-size': '32',
    '--ffn-hidden-size': '64',
    '--num-attention-heads': '4',
    '--seq-length': '16',
    '--max-position-embeddings': '16',
    '--position-embedding-type': 'rope',
    '--vocab-size': '64',
    '--tokenizer-type': 'NullTokenizer',
    '--make-vocab-size-divisible-by': '16',
    '--micro-batch-size': '2',
    '--global-batch-size': '4',
    '--train-iters': '6',
    '--lr': '1e-3',
    '--min-lr': '1e-4',
    '--lr-decay-style': 'cosine',
    '--lr-warmup-iters': '2',
    '--weight-decay': '0.01',
    '--clip-grad': '1.0',
    '--init-method-std': '0.05',
    '--attention-dropout': '0.0',
    '--hidden-dropout': '0.0',
    '--eval-iters': '0',
    '--eval-interval': '1000000',
    '--save-interval': '1000000',
    '--log-interval': '1',
    '--num-workers': '0',
    '--distributed-backend': 'gloo',
    '--distributed-timeout-minutes': '20',
    '--transformer-impl': 'local',
    '--attention-backend': 'unfused',
    '--use-cpu-initialization': None,
    '--no-gradient-accumulation-fusion': None,
    '--no-masked-softmax-fusion': None,
    '--no-bias-gelu-fusion': None,
    '--no-bias-swiglu-fusion': None,
    '--no-bias-dropout-fusion': None,
    '--no-rope-fusion': None,
    '--no-persist-layer-norm': None,
}

HYBRID_DEFAULTS = {key: value for key, value in GPT_DEFAULTS.items() if key != '--num-layers'} | {
    '--hybrid-layer-pattern': 'M*-M*-',
    '--mamba-state-dim': '8',
    '--mamba-head-dim': '8',
    '--mamba-num-groups': '2',
}

ON_GPU_DEFAULTS = {'--distributed-backend': 'nccl', '--deterministic-mode': None}


def with_defaults(kind: str, given: list[str]) -> list[str]:
    """The given megatron arguments, and the tiny run's for every option that isn't among them."""
    names = {argument.split('=', 1)[0] for argument in given}
    defaults = GPT_DEFAULTS if kind == 'gpt' else HYBRID_DEFAULTS
    if cpu_megatron.on_gpu():
        defaults = defaults | ON_GPU_DEFAULTS
    if '--num-experts' in names:
        # with a bias, core's SequentialMLP changes a view in place when TP and EP are 1
        defaults = defaults | {'--disable-bias-linear': None}
    added = []
    for name, value in defaults.items():
        if name not in names:
            added += [name] if value is None else [name, value]
    return [*added, *given]
