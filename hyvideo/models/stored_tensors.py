"""Files of tensors with a hash of their values, so that a file whose contents have changed is
noticed.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

VALUES_KEY = "values"  # name of the hash in the metadata


def hash_of(tensor: Tensor) -> str:
    """Return a hash of shape, type and values of a tensor on the CPU."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors and the hash of their names and values."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={VALUES_KEY: _hash_of_all(contiguous)})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of `save_tensors`. Raises ValueError if it has no hash, or other contents."""
    with safe_open(path, framework="pt") as file:
        given = (file.metadata() or {}).get(VALUES_KEY)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if given != _hash_of_all(tensors):
        raise ValueError(f"{path} has no hash of its values, or they have changed")
    return tensors


def _hash_of_all(tensors: Mapping[str, Tensor]) -> str:
    parts = [f"{name} {hash_of(tensors[name])}" for name in sorted(tensors)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
