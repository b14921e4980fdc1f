"""The checkpoints in ``data/``, and what is known of them; ``make_checkpoints.py`` made both."""

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch

DATA = Path(__file__).parent / 'data'
EXPECTED = DATA / 'expected.json'


def unpack(name: str, into: Path) -> Path:
    """The root of a checkpoint, as ``--load`` takes it."""
    with tarfile.open(DATA / f'{name}.tar.xz') as archive:
        archive.extractall(into, filter='data')
    return into


def expected(name: str) -> dict:
    """What is known of one: see ``make_checkpoints.py``."""
    return json.loads(EXPECTED.read_text())[name]


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes: of the optimizer's tensors."""
    result = {}
    for name, tensor in sorted(tensors.items()):
        if 'optimizer.' in name:
            digest = hashlib.sha256(f'{tensor.dtype} {list(tensor.shape)} '.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            result[name] = digest.hexdigest()
    return result
