"""Random numbers that are a function of what they are for, not of who draws them.

Every draw is keyed by a tuple such as ``(seed, "step noise", iteration, prompt, rollout, step)``. Ranks of a
sequence-parallel group therefore draw the same numbers without talking, a run on another number of ranks makes the
same rollouts, and a resumed run needs no saved generator state (method.md, 11).

numpy's Philox gives the same bits on every machine; torch's CPU generator depends on the instruction set.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # prompts are checked before anything slow is imported
    from torch import Tensor


def generator(*key: int | str) -> np.random.Generator:
    """A counter-based generator for one purpose. Equal keys give equal streams, in any process."""
    if not all(isinstance(part, (int, str)) for part in key):
        raise TypeError(f"a random key is made of ints and strings, got {key!r}")
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(shape: tuple[int, ...], *key: int | str) -> "Tensor":
    """Standard normal float32 numbers on the CPU. Shape: ``shape``."""
    import torch

    return torch.from_numpy(generator(*key).standard_normal(shape, dtype=np.float32))


def permutation(length: int, *key: int | str) -> list[int]:
    """A random order of ``range(length)``."""
    return generator(*key).permutation(length).tolist()
