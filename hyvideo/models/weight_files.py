"""Weight files: comparison of their headers with a model, and streaming of their tensors.

`stream_tensors` reads tensors into separate buffers, so that the peak of host memory is the model
plus one tensor. Files are not memory-mapped: pages of a 33 GB file count as used memory once they
are read.
"""

import hashlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyvideo.data.files import read_json
from hyvideo.models.damage import DamageCheck, check_values

Shapes = dict[str, tuple[int, ...]]

_NUM_PROBLEMS_SHOWN = 10
# what download programs append to the name of a file of which parts are missing
UNFINISHED = (".aria2", ".incomplete")
_LARGE = 2**27  # parameters of a model
# safetensors' names of dtypes
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


class Folder(NamedTuple):
    """Path of a component, and the component's name in messages."""

    path: Path
    label: str


class Weights(NamedTuple):
    """Headers of a folder's weight files."""

    shapes: Shapes
    files: dict[str, Path]  # tensor name -> file that contains it
    drawn: dict[str, int]  # prefix of tensor names -> seed


def read_header(folder: Folder, stem: str) -> Weights:
    """Return the names and shapes of a folder's tensors.

    Raises ValueError for a missing or corrupted file.
    """
    found = Weights({}, {}, {})
    for path in weight_paths(folder, stem):
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                names = file.keys()
                found.shapes.update(
                    (name, tuple(file.get_slice(name).get_shape())) for name in names
                )
                found.files.update(dict.fromkeys(names, path))
                drawn = json.loads((file.metadata() or {}).get("drawn", "{}"))
                found.drawn.update((prefix, int(seed)) for prefix, seed in drawn.items())
        except (
            SafetensorError,
            ValueError,
            AttributeError,
            TypeError,
            OSError,
            OverflowError,
        ) as error:
            raise ValueError(
                f"{folder.label}: {path} is truncated, a git-lfs pointer or not a safetensors file "
                f"({error}); download it again"
            ) from error
    return found


def weight_paths(folder: Folder, stem: str) -> list[Path]:
    """Return a folder's weight files: ``<stem>.safetensors``, or the files in its index.

    ValueError if missing or not downloaded to the end.
    """
    paths = _weight_paths(folder, stem)
    for path in paths:
        check_finished(path, folder.label)
    return paths


def check_finished(path: Path, label: str) -> None:
    """Raise ValueError if a download program has left the mark of an unfinished download beside a
    file.
    """
    for ending in UNFINISHED:
        mark = path.with_name(path.name + ending)
        if mark.exists():
            raise ValueError(
                f"{label}: the download of {path} is not finished, because {mark.name} lies beside "
                "it; continue the download, or delete both files and download it again"
            )


def _weight_paths(folder: Folder, stem: str) -> list[Path]:
    whole = folder.path / f"{stem}.safetensors"
    index = folder.path / f"{stem}.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(
            f"{folder.label}: neither {whole.name} nor {index.name} exists in {folder.path}"
        )
    names = read_json(index, folder.label)["weight_map"].values()
    paths = [folder.path / name for name in sorted(set(names))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder.label}: {index.name} lists {missing}, which are missing from {folder.path}"
        )
    return paths


def stream_tensors(
    weights: Weights, expected: Shapes, *, label: str, read: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs on the CPU: those in the files, then the expected ones that the
    files omit, generated.

    ``read=False`` yields meta tensors in the same order, for ranks that receive the values from
    another rank. Raises ValueError, beginning with ``label``, for a damaged file, after the last
    tensor: until then, the other ranks wait for the values.
    """
    checks = []
    for path in sorted(set(weights.files.values())):
        check = DamageCheck(label, path)
        checks.append(check)
        with safe_open(path, framework="pt", backend="pread") as file:
            for name in file.offset_keys():  # in file order
                header = file.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(
                        f"tensor {name!r} in {path} must have dtype {', '.join(_DTYPES)}, got "
                        f"{dtype}"
                    )
                if read:
                    tensor = file.get_tensor(name)
                else:
                    tensor = torch.empty(header.get_shape(), dtype=_DTYPES[dtype], device="meta")
                check.add(name, tensor)
                yield name, tensor
    device = "cpu" if read else "meta"
    for name, shape in expected.items():
        if name not in weights.shapes:
            yield name, draw_tensor(seed_for(name, weights.drawn), name, shape, device)
    for check in checks:
        check.finish()


def tensor_problems(folder: Folder, expected: Shapes, weights: Weights) -> list[str]:
    """Return a message for each tensor that is missing, unexpected or of another shape than the
    model's.
    """
    problems = []
    for name in sorted(set(expected) | set(weights.shapes)):
        shape = weights.shapes.get(name)
        needed = expected.get(name)
        tensor = f"tensor {name!r} in {weights.files.get(name)}"
        if needed is None:
            problems.append(
                f"{tensor} is unexpected: the model of {folder.path / 'config.json'} does not have "
                "it"
            )
        elif shape is None and seed_for(name, weights.drawn) is None:
            files = (
                ", ".join(sorted({path.name for path in weights.files.values()}))
                or "the weight file"
            )
            problems.append(
                f"tensor {name!r} of shape {needed} is missing from {folder.path / files}"
            )
        elif shape not in (None, needed):
            problems.append(f"{tensor} has shape {shape}, but the model needs {needed}")
    return problems


def shapes_of(state_dict: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def draw_tensors(
    seed: int, shapes: Shapes, device: str | torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the random weights of a model one by one, as (name, tensor) pairs; meta tensors if
    ``device`` is meta.

    Large models are generated on the GPU; small ones on the CPU, so that they do not depend on the
    device.
    """
    is_small = sum(map(math.prod, shapes.values())) < _LARGE
    source = "cpu" if is_small and torch.device(device).type != "meta" else device
    for name, shape in shapes.items():
        yield name, draw_tensor(seed, name, shape, source)


def draw_tensor(
    seed: int, name: str, shape: tuple[int, ...], device: str | torch.device = "cpu"
) -> Tensor:
    """Return the random float32 weight of a tensor, determined by seed and name; it is
    bit-identical on every CPU.

    Matrices and kernels are normal with variance 1 / fan-in, token embeddings are standard normal,
    scales of norms are 1 and biases 0. ``name`` is the name in the original layout, so that both
    layouts give the same model. Values on a GPU differ.
    """
    device = torch.device(device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1 or name.endswith(".gamma"):
        return torch.ones(shape, device=device)
    key = int.from_bytes(
        hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little"
    )
    fan_in = 1 if name.endswith("embed_tokens.weight") else math.prod(shape[1:])
    if device.type == "meta":
        return torch.empty(shape, device=device)
    if device.type != "cpu":
        drawn = torch.Generator(device).manual_seed(key % 2**64)
        return torch.randn(shape, generator=drawn, device=device).div_(math.sqrt(fan_in))
    generator = np.random.Generator(np.random.Philox(key=key))
    # In double precision: tail values may differ in the last bit between C libraries, which
    # rounding removes.
    return torch.from_numpy(
        (generator.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32)
    )


def seed_for(name: str, drawn: Mapping[str, int]) -> int | None:
    """Return the seed of a tensor that a compact file omits, or None."""
    return next((seed for prefix, seed in drawn.items() if name.startswith(prefix)), None)


def read_safetensors(path: Path, label: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a file into memory.

    Raises ValueError, naming the file, if it is corrupted or damaged.
    """
    check_finished(path, label)
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            tensors = file.get_tensors()
            order = file.offset_keys()
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{label}: {path} is missing, truncated or not a safetensors file ({error})"
        ) from error
    check_values({name: tensors[name] for name in order}, label, path)
    return tensors, metadata


def read_pickle(path: Path, label: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read tensors by name from a ``torch.save`` file, memory-mapped if possible.

    Raises ValueError if corrupted or damaged.
    """
    check_finished(path, label)
    try:
        content = torch.load(
            path, map_location=device, mmap=zipfile.is_zipfile(path), weights_only=True
        )
        content = content.get("state_dict", content)
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{label}: {path} is missing, truncated, a git-lfs pointer or not a weight file "
            f"({error})"
        ) from error
    if isinstance(content, dict) and all(isinstance(tensor, Tensor) for tensor in content.values()):
        check_values(content, label, path)
        return content
    raise ValueError(f"{label}: {path} must contain only a dictionary of tensors")


def problems_of(check: Callable[[], Iterable[str]]) -> list[str]:
    """Return the problems that `check` finds, or the message of the ValueError that it raises."""
    try:
        return list(check())
    except ValueError as error:
        return [str(error)]


def raise_problems(folder: Folder, problems: list[str]) -> None:
    """Raise one ValueError that lists the problems, if there are any."""
    if problems:
        listed = "\n  ".join(truncate(problems))
        raise ValueError(f"{folder.label}: {folder.path} does not fit:\n  {listed}")


def with_label(folder: Folder, problems: list[str]) -> list[str]:
    """Return the first problems, each prefixed with the folder's label."""
    return [f"{folder.label}: {problem}" for problem in truncate(problems)]


def truncate(problems: list[str]) -> list[str]:
    """Return the first problems and a count of the rest: a wrong checkpoint may differ in a
    thousand tensors.
    """
    more = len(problems) - _NUM_PROBLEMS_SHOWN
    return problems if more <= 0 else [*problems[:_NUM_PROBLEMS_SHOWN], f"and {more} more"]
