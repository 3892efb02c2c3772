"""Files of weights: their headers compared with a model, and their tensors one after another.

`read_header` and `tensor_problems` say from the headers alone whether a folder fits a model. `stream_tensors` then
reads each tensor into memory of its own, so that the peak of host memory is the model and one tensor. Nothing is
memory-mapped: a map of a 33 GB file counts as memory once it is read, and machines with less refuse to make it.
"""

import hashlib
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyvideo.data.outside import parse_json, shown

Shapes = dict[str, tuple[int, ...]]

_NUM_PROBLEMS_SHOWN = 10
_LARGE = 2**27  # numbers of a model
# safetensors' names of types
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


class Folder(NamedTuple):
    """Path of a component, and its name in messages."""

    path: Path
    label: str


class Weights(NamedTuple):
    """Contents of the headers of a folder's weight files."""

    shapes: Shapes
    files: dict[str, Path]  # tensor name -> the file that holds it
    drawn: dict[str, int]  # prefix of tensor names -> seed


def read_header(folder: Folder, stem: str) -> Weights:
    """Names and shapes of the folder's tensors; ValueError for a file that is missing, truncated or of another kind."""
    found = Weights({}, {}, {})
    for path in weight_paths(folder, stem):
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                names = file.keys()
                found.shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in names)
                found.files.update(dict.fromkeys(names, path))
                drawn = parse_json((file.metadata() or {}).get("drawn", "{}"))
                found.drawn.update((prefix, int(seed)) for prefix, seed in drawn.items())
        except (SafetensorError, ValueError, AttributeError, TypeError, OSError) as error:
            raise ValueError(
                f"{folder.label}: {path} is truncated or no safetensors file ({error}); download it again"
            ) from error
    return found


def weight_paths(folder: Folder, stem: str) -> list[Path]:
    """The files of a folder's weights: ``<stem>.safetensors`` or those of its index; ValueError without."""
    whole = folder.path / f"{stem}.safetensors"
    index = folder.path / f"{stem}.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(f"{folder.label}: neither {whole.name} nor {index.name} exists in {folder.path}")
    weight_map = read_json(index, folder.label).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and PurePath(name).name == name for name in names):
        raise ValueError(f"{folder.label}: {index} must name files of its own folder, got {shown(weight_map)}")
    paths = [folder.path / name for name in sorted(set(names))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{folder.label}: {index.name} names {missing}, which are not in {folder.path}")
    return paths


def stream_tensors(weights: Weights, expected: Shapes, *, read: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Expected tensors with their names, on the CPU: read, or drawn where the files leave them out.

    ``read=False`` gives tensors without memory, in the same order, for a process that gets the values elsewhere.
    """
    for path in sorted(set(weights.files.values())):
        with safe_open(path, framework="pt", backend="pread") as file:
            for name in file.offset_keys():  # in the order of their bytes
                header = file.get_slice(name)
                if (dtype := header.get_dtype()) not in _DTYPES:
                    raise ValueError(f"tensor {name!r} in {path} must be of {', '.join(_DTYPES)}, got {dtype}")
                without_memory = torch.empty(header.get_shape(), dtype=_DTYPES[dtype], device="meta")
                yield name, file.get_tensor(name) if read else without_memory
    for name, shape in expected.items():
        if name not in weights.shapes:
            yield name, draw_tensor(seed_for(name, weights.drawn), name, shape, "cpu" if read else "meta")


def tensor_problems(folder: Folder, expected: Shapes, weights: Weights) -> list[str]:
    """Tensors that are missing, unexpected or of another shape than the model's, in sentences."""
    problems = []
    for name in sorted(set(expected) | set(weights.shapes)):
        shape, needed = weights.shapes.get(name), expected.get(name)
        tensor = f"tensor {name!r} in {weights.files.get(name)}"
        if needed is None:
            problems.append(f"{tensor} is unexpected, the model of {folder.path / 'config.json'} has none")
        elif shape is None and seed_for(name, weights.drawn) is None:
            files = ", ".join(sorted({path.name for path in weights.files.values()})) or "the weight file"
            problems.append(f"tensor {name!r} of shape {needed} is missing in {folder.path / files}")
        elif shape not in (None, needed):
            problems.append(f"{tensor} has shape {shape}, the model needs {needed}")
    return problems


def shapes_of(state_dict: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def draw_tensors(seed: int, shapes: Shapes, device: str | torch.device) -> Iterator[tuple[str, Tensor]]:
    """Random weights of a whole model, one after another; without memory where ``device`` is meta.

    A GPU draws those of a large model itself, in seconds for 8 billion; a small one is the same on every device.
    """
    is_small = sum(map(math.prod, shapes.values())) < _LARGE
    place = "cpu" if is_small and torch.device(device).type != "meta" else device
    for name, shape in shapes.items():
        yield name, draw_tensor(seed, name, shape, place)


def draw_tensor(seed: int, name: str, shape: tuple[int, ...], device: str | torch.device = "cpu") -> Tensor:
    """The random float32 weight that belongs to a seed and a tensor's name; every CPU draws the same bits.

    Matrices and kernels are normal with variance 1 / fan-in, embeddings of tokens standard normal, scales of norms
    one, biases zero. The name is that in the original checkpoint, so that both layouts are the same model. Other
    devices than the CPU draw other values; meta none.
    """
    device = torch.device(device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1 or name.endswith(".gamma"):
        return torch.ones(shape, device=device)
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    fan_in = 1 if name.endswith("embed_tokens.weight") else math.prod(shape[1:])
    if device.type == "meta":
        return torch.empty(shape, device=device)
    if device.type != "cpu":
        drawn = torch.Generator(device).manual_seed(key % 2**64)
        return torch.randn(shape, generator=drawn, device=device).div_(math.sqrt(fan_in))
    generator = np.random.Generator(np.random.Philox(key=key))
    # In double precision: a tail value may differ in its last bit between C libraries, and rounding hides it.
    return torch.from_numpy((generator.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32))


def seed_for(name: str, drawn: Mapping[str, int]) -> int | None:
    """The seed of a tensor that a compact file leaves out, or None."""
    return next((seed for prefix, seed in drawn.items() if name.startswith(prefix)), None)


def read_json(path: Path, label: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, where there is none."""
    if not path.is_file():
        raise ValueError(f"{label}: {path} does not exist")
    try:
        content = parse_json(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{label}: {path} is not JSON ({error})") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{label}: {path} must hold a JSON object, got {type(content).__name__}")


def read_safetensors(path: Path, label: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that fits into memory. Raises ValueError, naming the file, for a damaged one."""
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            return file.get_tensors(), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{label}: {path} is missing, truncated or no safetensors file ({error})") from error


def read_pickle(path: Path, label: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Tensors by name in a file of ``torch.save``, mapped where its format allows it. Raises ValueError."""
    try:
        content = torch.load(path, map_location=device, mmap=zipfile.is_zipfile(path), weights_only=True)
        content = content.get("state_dict", content)
    except (OSError, RuntimeError, EOFError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{label}: {path} is missing, truncated or no file of weights ({error})") from error
    if isinstance(content, dict) and all(isinstance(tensor, Tensor) for tensor in content.values()):
        return content
    raise ValueError(f"{label}: {path} holds more than tensors by name")


def problems_of(check: Callable[[], Iterable[str]]) -> list[str]:
    """Problems that `check` finds, or the one that kept it from looking."""
    try:
        return list(check())
    except ValueError as error:
        return [str(error)]


def refuse(folder: Folder, problems: list[str]) -> None:
    """Raises one ValueError for a list of problems, if there are any."""
    if problems:
        listed = "\n  ".join(shortened(problems))
        raise ValueError(f"{folder.label}: {folder.path} does not fit:\n  {listed}")


def labelled(folder: Folder, problems: list[str]) -> list[str]:
    """Problems of a folder with its name before each, shortened."""
    return [f"{folder.label}: {problem}" for problem in shortened(problems)]


def shortened(problems: list[str]) -> list[str]:
    """The list cut where nobody reads on: a checkpoint of another model differs in a thousand tensors."""
    more = len(problems) - _NUM_PROBLEMS_SHOWN
    return problems if more <= 0 else [*problems[:_NUM_PROBLEMS_SHOWN], f"and {more} more"]
