"""Damage in weight files whose headers are intact: zeros where a download was interrupted, and
values that are not finite.

Programs that reserve the space of a file before they download it, and power cuts, leave files of
the full size with blocks of zeros. The values are looked at while they are loaded, so that no file
is read twice.
"""

import math
import re
from itertools import groupby
from pathlib import Path

from torch import Tensor

# A block of zeros in a matrix is damage if it is larger than both. Smaller ones occur: unused rows
# of an embedding, or the row of a table with three entries.
_MAX_SHARE = 0.01
_MAX_BYTES = 2**15
_SEGMENTS = 8  # that such a block is divided into
_WINDOW = 16  # first values of a segment; the segment is read only if they are zero
# Single projections are zero before training, rarely two in a row.
_MAX_ZERO_MATRICES = 2
# Without them a model is blind: prompts, or videos, would not differ.
_EMBEDDING = re.compile(
    r"(^|\.)(shared|embed_tokens|token_embedding|word_embeddings|wte|patch_embedding|img_in)\b"
    r".*\.weight$"
)
# The second matrix of a LoRA is zero before training, and many LoRA files list parameters that they
# do not change.
_OFTEN_ZERO = re.compile(r"\.lora_(B|up)\b|\.(diff|diff_b|diff_m|difference)$")


class DamageCheck:
    """Looks at the tensors of a weight file one by one, in the order of the file.

    A tensor may be zero as a whole. Refused are an embedding of zeros, a block of zeros in a
    matrix, three matrices of zeros in a row, a file of zeros, and values that are not finite.
    """

    def __init__(self, label: str, file: Path | str):
        self.label = label
        self.file = file
        self.problems: list[str] = []
        self._zero_matrices: list[str] = []  # in a row, up to the current tensor
        self._all_zero = True

    def add(self, name: str, tensor: Tensor) -> None:
        """Look at the next tensor; tensors on the meta device have no values."""
        if tensor.is_meta or tensor.numel() == 0:
            return
        if tensor.is_floating_point() and tensor.element_size() == 1:
            return  # PyTorch has no minimum of 8-bit numbers
        lowest, highest = (value.item() for value in tensor.detach().aminmax())
        # the minimum and the maximum are NaN if any value is
        if not math.isfinite(lowest) or not math.isfinite(highest):
            self.problems.append(f"tensor {name!r} in {self.file} has values that are not finite")
            return
        if lowest != 0 or highest != 0:
            self._all_zero = False
            self._zero_matrices = []
            self._look_for_block(name, tensor)
        elif tensor.ndim > 1 and not _OFTEN_ZERO.search(name):
            self._zero_matrices.append(name)
            if _EMBEDDING.search(name):
                self.problems.append(f"tensor {name!r} in {self.file}, an embedding, is zero")
            if len(self._zero_matrices) == _MAX_ZERO_MATRICES + 1:
                self.problems.append(
                    f"tensors {self._zero_matrices[0]!r} to {name!r} in {self.file} are zero"
                )

    def _look_for_block(self, name: str, tensor: Tensor) -> None:
        if tensor.ndim < 2 or _OFTEN_ZERO.search(name):
            return
        block = zero_block(tensor)
        if block:
            self.problems.append(
                f"tensor {name!r} in {self.file} has a block of {block:,} zeros among "
                f"{tensor.numel():,} values"
            )

    def finish(self) -> None:
        """Raise ValueError if the file is damaged."""
        if self._all_zero and self._zero_matrices and not self.problems:
            self.problems.append(f"all tensors in {self.file} are zero")
        if self.problems:
            more = len(self.problems) - 1
            others = f", and {more} more problems" if more else ""
            raise ValueError(
                f"{self.label}: {self.problems[0]}{others}. The file is damaged, as interrupted "
                "downloads and power cuts leave it; download it again or use another one"
            )


def check_values(tensors: dict[str, Tensor], label: str, file: Path | str) -> None:
    """Raise ValueError, naming the file and a tensor, if the values of a weight file are damaged."""
    check = DamageCheck(label, file)
    for name, tensor in tensors.items():
        check.add(name, tensor)
    check.finish()


def zero_block(tensor: Tensor) -> int:
    """Return the length of the longest block of zeros, about 1 % of the tensor or longer, else 0.

    Only segments whose first values are zero are read.
    """
    values = tensor.detach().flatten()
    shortest = max(int(_MAX_SHARE * len(values)), _MAX_BYTES // values.element_size())
    length = max(_WINDOW, shortest // _SEGMENTS)
    count = len(values) // length
    segments = values[: count * length].view(count, length)
    is_zero = (segments[:, :_WINDOW] == 0).all(dim=1)
    is_zero[is_zero.clone()] = (segments[is_zero] == 0).all(dim=1)
    runs = [len(list(run)) for value, run in groupby(is_zero.tolist()) if value]
    longest = max(runs, default=0)
    if longest < _SEGMENTS:
        return 0
    return longest * length
