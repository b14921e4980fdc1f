"""Deterministic training samples and the forward step over them."""

from functools import partial

import torch
from torch import Tensor


class SyntheticTokens(torch.utils.data.Dataset):
    """Sample ``i`` is a sequence drawn with seed ``i``: the same in every run and on every rank."""

    def __init__(self, length: int, seq_length: int, vocab_size: int):
        self.length = length
        self.seq_length = seq_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + int(index))
        tokens = torch.randint(self.vocab_size, (self.seq_length + 1,), generator=generator)
        return {
            'tokens': tokens[:-1],
            'labels': tokens[1:],
            'loss_mask': torch.ones(self.seq_length),
            'position_ids': torch.arange(self.seq_length),
        }


def datasets_from_args(num_samples, vp_stage=None) -> list[SyntheticTokens | None]:
    """The training, validation and test datasets that ``pretrain`` asks for."""
    from megatron.training import get_args

    args = get_args()
    return [
        SyntheticTokens(length, args.seq_length, args.vocab_size) if length else None
        for length in num_samples
    ]


datasets_from_args.is_distributed = True  # every rank builds them


def causal_mask(seq_length: int) -> Tensor:
    """[1, 1, s, s], True where a position must not look."""
    return torch.ones(seq_length, seq_length, dtype=torch.bool).triu(1)[None, None]


def loss_func(loss_mask: Tensor, output: Tensor):
    """Summed loss, number of tokens, and both for the log."""
    loss = (output.float().view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {'lm loss': torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    """One microbatch; every pipeline stage and tensor-parallel rank reads the same samples."""
    batch = {name: value.cuda() for name, value in next(data_iterator).items()}
    output = model(
        batch['tokens'],
        batch['position_ids'],
        causal_mask(batch['tokens'].shape[1]).cuda(),
        labels=batch['labels'],
    )
    return output, partial(loss_func, batch['loss_mask'])
