"""Random numbers that are determined by the seed and their purpose, in any process.

Every draw is keyed by a tuple such as ``(seed, "step noise", iteration, prompt, rollout, step)``:
ranks draw equal numbers without communication, and a resumed run needs no saved generator state.
numpy's Philox gives the same bits on every machine; torch's CPU generator depends on the
instruction set.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # prompts are checked before anything slow is imported
    from torch import Tensor


def generator(*key: int | str) -> np.random.Generator:
    """Return a counter-based generator for a key. Equal keys give equal streams in any process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(shape: tuple[int, ...], *key: int | str) -> "Tensor":
    """Return standard normal float32 numbers on the CPU, determined by the key.

    Shape: ``shape``.
    """
    import torch

    return torch.from_numpy(generator(*key).standard_normal(shape, dtype=np.float32))


def reference_normal(shape: tuple[int, ...], seed: int) -> "Tensor":
    """Return the original pipeline's initial noise for a seed: bf16 numbers of torch's generator.

    Shape: ``shape``.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, *shape, generator=generator, dtype=torch.bfloat16)[0].float()


def permutation(length: int, *key: int | str) -> list[int]:
    """Return a random order of ``range(length)``, determined by the key."""
    return generator(*key).permutation(length).tolist()
