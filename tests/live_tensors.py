"""Count of the tensors, or NumPy arrays, that are in memory at the same time."""

import weakref
from collections.abc import Iterable


class LiveTensors:
    """Counts tensors from when they are added until their last reference is gone."""

    def __init__(self):
        self.references: list[weakref.ref] = []
        self.most = 0  # at any time when tensors were added

    def add(self, tensors: Iterable) -> None:
        self.references += map(weakref.ref, tensors)
        self.most = max(self.most, sum(reference() is not None for reference in self.references))
