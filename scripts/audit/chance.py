"""Random draws of a run, from their keys (method of `hyvideo/data/randomness.py`, written again).

A key is a tuple such as ``(seed, "initial noise", iteration, group, member)``. Its blake2b digest of
16 bytes is the key of numpy's Philox.
"""

import hashlib
from functools import lru_cache

import numpy as np


def generator(*key: int | str) -> np.random.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def first_normal(*key: int | str) -> float:
    """Return the first number of the noise of a key, float32."""
    return float(generator(*key).standard_normal(1, dtype=np.float32)[0])


@lru_cache(maxsize=8)  # an iteration asks for that of its epoch once per prompt
def order(count: int, *key: int | str) -> list[int]:
    """Return the order of ``count`` things."""
    return generator(*key).permutation(count).tolist()


def turns(count: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Return which of ``count`` prompts an iteration has: each once per epoch, every epoch in an
    order of its own.
    """
    first = (iteration - 1) * per_iteration
    found = []
    for place in range(first, first + per_iteration):
        epoch, within = divmod(place, count)
        found.append(order(count, seed, "prompt order", epoch)[within])
    return found
