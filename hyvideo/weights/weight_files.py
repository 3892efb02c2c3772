"""Weight files: comparison of their headers with a model, and streaming of their tensors.

`stream_tensors` reads tensors into separate buffers, so that the peak of host memory is the model
plus one tensor. Files are not memory-mapped: pages of a 33 GB file count as used memory once they
are read.
"""

import hashlib
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyvideo.files.files import read_json
from hyvideo.weights.damage import DamageCheck, check_values

Shapes = dict[str, tuple[int, ...]]

_NUM_PROBLEMS_SHOWN = 10
# what download programs append to the name of a file of which parts are missing
UNFINISHED = (".aria2", ".incomplete")
_LARGE = 2**27  # parameters of a model
# Words that torch's wrappers add to names, and tensors that a model computes itself.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_COMPUTED = re.compile(r"(^|\.)(inv_freq|position_ids)$")
# Files of 8-bit numbers have the scale of ``X.weight`` under one of two names, ComfyUI's and vLLM's,
# and often marks and scales of activations, which are not needed to restore the weights.
_SCALES = ("scale_weight", "weight_scale")
_SCALED = ("F8_E4M3", "F8_E5M2")
_BESIDE_SCALES = re.compile(r"(^|\.)(scaled_fp8|scale_input|input_scale|comfy_quant)$")
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


@dataclass(frozen=True)
class Weights:
    """Headers of a folder's weight files, by the names of tensors in the model."""

    shapes: Shapes
    files: dict[str, Path]  # tensor name -> file that contains it
    drawn: dict[str, int] = field(default_factory=dict)  # prefix of tensor names -> seed
    names: dict[str, str] = field(default_factory=dict)  # tensor name -> name in the file
    dtypes: dict[str, str] = field(default_factory=dict)  # safetensors' names
    scales: dict[str, tuple[Path, str]] = field(default_factory=dict)  # of tensors in 8 bits


def read_header(folder: Folder, stem: str, rename: Callable[[str], str] = str) -> Weights:
    """Return the names and shapes of a folder's tensors.

    ``rename`` returns a tensor's name in the model, or "" for one that the model does not read;
    before it, the names of torch's wrappers are removed. Raises ValueError for a missing or
    corrupted file, and for two tensors of one name whose values differ.
    """
    found = Weights({}, {})
    twins: list[tuple[tuple[Path, str], tuple[Path, str]]] = []
    for path in weight_paths(folder, stem):
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                for stored in file.keys():
                    plain = without_wrappers(stored)
                    name = "" if _COMPUTED.search(plain) else rename(plain)
                    if not name:
                        continue
                    if name in found.files:
                        twins.append(((found.files[name], found.names[name]), (path, stored)))
                    header = file.get_slice(stored)
                    found.shapes[name] = tuple(header.get_shape())
                    found.dtypes[name] = header.get_dtype()
                    found.files[name] = path
                    found.names[name] = stored
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
    for first, second in twins:
        if not torch.equal(_read_tensor(*first), _read_tensor(*second)):
            raise ValueError(
                f"{folder.label}: {first[1]!r} in {first[0]} and {second[1]!r} in {second[0]} are "
                "one tensor of the model, but their values differ; use files that have only one"
            )
    _match_scales(found)
    return found


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the words that DDP, FSDP, compilation and activation
    checkpointing add.
    """
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _read_tensor(path: Path, stored: str) -> Tensor:
    with safe_open(path, framework="pt", backend="pread") as file:
        return file.get_tensor(stored)


def _match_scales(found: Weights) -> None:
    """Move the scales of 8-bit weights, one number or one per row, from ``shapes`` to ``scales``."""
    for name in [name for name, dtype in found.dtypes.items() if dtype in _SCALED]:
        module, _, last = name.rpartition(".")
        shape = found.shapes[name]
        for scale in (f"{module}.{each}" for each in _SCALES if last == "weight" and shape):
            size = found.shapes.get(scale)
            if size is not None and math.prod(size) in (1, shape[0]) and len(size) <= len(shape):
                found.scales[name] = (found.files[scale], found.names[scale])
                del found.shapes[scale]
                break
    if found.scales:
        for name in [name for name in found.shapes if _BESIDE_SCALES.search(name)]:
            del found.shapes[name]


def weight_paths(folder: Folder, stem: str) -> list[Path]:
    """Return a folder's weight files: ``<stem>.safetensors``, or its parts, with or without an
    index.

    ValueError if missing, not downloaded to the end, or if there are both.
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
    parts = sorted(folder.path.glob(f"{stem}-*-of-*.safetensors"))
    if index.is_file():
        names = read_json(index, folder.label)["weight_map"].values()
        listed_in = index.name
    else:
        counts = {path.stem.rpartition("-")[2] for path in parts}
        names = [
            f"{stem}-{number:0{len(count)}}-of-{count}.safetensors"
            for count in counts
            if count.isdecimal()
            for number in range(1, int(count) + 1)
        ]
        listed_in = "the name of a part"
    paths = [folder.path / name for name in sorted(set(names))]
    if whole.is_file() and paths in ([], [whole]):
        return [whole]
    missing = [path.name for path in paths if not path.is_file()]
    if whole.is_file() and missing == [path.name for path in paths]:
        return [whole]
    if whole.is_file():
        raise ValueError(
            f"{folder.label}: {folder.path} has {whole.name} and the parts of {listed_in}, and "
            "programs differ in which of them they read; delete the older of the two"
        )
    if not paths:
        raise ValueError(
            f"{folder.label}: {folder.path} has neither {whole.name} nor {index.name}; there is "
            f"{contents_of(folder.path)}. Download the first, or the second and its parts; a variant such as "
            f"{stem}.fp16.safetensors may be renamed"
        )
    if missing:
        raise ValueError(
            f"{folder.label}: {listed_in} lists {missing}, which are missing from {folder.path}"
        )
    return paths


def contents_of(folder: Path) -> str:
    """Return the first names in a folder, for a message."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    more = (
        f" and {len(names) - _NUM_PROBLEMS_SHOWN} more" if len(names) > _NUM_PROBLEMS_SHOWN else ""
    )
    return (", ".join(names[:_NUM_PROBLEMS_SHOWN]) or "nothing") + more


def stream_tensors(
    weights: Weights, expected: Shapes, *, label: str, read: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs on the CPU: those in the files, then the expected ones that the
    files omit, generated. Numbers of 8 bits are multiplied by their scales, in float32.

    ``read=False`` yields meta tensors in the same order, for ranks that receive the values from
    another rank. Raises ValueError, beginning with ``label``, for a damaged file, after the last
    tensor: until then, the other ranks wait for the values.
    """
    checks = []
    for path in sorted(set(weights.files.values())):
        check = DamageCheck(label, path)
        checks.append(check)
        names = {
            weights.names[name]: name for name in weights.shapes if weights.files[name] == path
        }
        with safe_open(path, framework="pt", backend="pread") as file:
            for stored in file.offset_keys():  # in file order
                if stored not in names:
                    continue
                name = names[stored]
                if read:
                    tensor = file.get_tensor(stored)
                    if name in weights.scales:
                        scale = _read_tensor(*weights.scales[name]).float()
                        tensor = tensor.float() * scale.reshape(-1, *[1] * (tensor.ndim - 1))
                else:
                    dtype = _DTYPES.get(weights.dtypes[name], torch.float32)
                    tensor = torch.empty(weights.shapes[name], dtype=dtype, device="meta")
                check.add(stored, tensor)
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
    unreadable = [
        name
        for name, dtype in weights.dtypes.items()
        if name in expected and dtype not in _DTYPES and name not in weights.scales
    ]
    if unreadable:
        first = unreadable[0]
        problems.append(
            f"tensor {first!r} in {weights.files[first]} has dtype {weights.dtypes[first]} "
            f"({len(unreadable)} tensors in all), and no scale: 8-bit numbers are read if they are "
            f"{' or '.join(_SCALED)} with one number or one per row in MODULE.{_SCALES[0]} or "
            f"MODULE.{_SCALES[1]}; use the model in bfloat16"
        )
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
        check_dtypes(content, label, path)
        check_values(content, label, path)
        return content
    raise ValueError(f"{label}: {path} must contain only a dictionary of tensors")


def check_dtypes(tensors: Mapping[str, Tensor], label: str, path: Path) -> None:
    """Raise ValueError for a tensor of 8-bit numbers, whose scales are not known."""
    for name, tensor in tensors.items():
        if tensor.element_size() == 1 and tensor.dtype != torch.bool:
            raise ValueError(
                f"{label}: tensor {name!r} in {path} has dtype {tensor.dtype}; quantized weights "
                "are not read here, use the model in bfloat16"
            )


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
