"""Cache of tables that depend on shapes alone, such as rotary frequencies and masks."""

import functools
from collections.abc import Callable
from typing import TypeVar

from torch._guards import detect_fake_mode

T = TypeVar("T")
MAX_TABLES = 4  # training and validation may use different video sizes


def cached_tables(make: Callable[..., T]) -> Callable[..., T]:
    """Return the function with a cache of its last results.

    FLOPs are counted on fake tensors, which have no values. Tables of such a count are not kept,
    because a later forward pass of the same size would read them.
    """
    cached = functools.lru_cache(maxsize=MAX_TABLES)(make)

    @functools.wraps(make)
    def tables(*key: object) -> T:
        return cached(*key) if detect_fake_mode() is None else make(*key)

    tables.cache_clear = cached.cache_clear
    return tables
