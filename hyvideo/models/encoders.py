"""Frozen encoders by classes of transformers, loaded strictly: headers are compared with the class's tensors first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyvideo.models import weight_files
from hyvideo.models.weight_files import Folder, Weights, labelled, shapes_of


def class_problems(
    cls: type, folder: Folder, weights_needed: bool = True, *, plain: Callable[[str], str] = str
) -> list[str]:
    """Problems that keep a class of transformers from loading a folder; tensors of other models in it are none.

    ``plain`` takes from a tensor's name what differs between the files of a class.
    """
    config = read_config(cls, folder)
    if not weights_needed:
        return []
    with torch.device("meta"):
        expected = {plain(name): shape for name, shape in shapes_of(cls(config).state_dict()).items()}
    header = weight_files.read_header(folder, "model")
    shapes = {plain(name): shape for name, shape in header.shapes.items() if plain(name) in expected}
    files = {plain(name): path for name, path in header.files.items()}
    return labelled(folder, weight_files.tensor_problems(folder, expected, Weights(shapes, files, drawn={})))


def frozen(
    cls: type,
    folder: Folder,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
    plain: Callable[[str], str] = str,
) -> nn.Module:
    """The model of a folder, read or drawn, in eval mode. Raises ValueError where its files do not fit."""
    if random_weights_seed is None:
        weight_files.refuse(folder, class_problems(cls, folder, plain=plain))
        model = _pretrained(cls, folder, dtype, device)
    else:
        model = _randomly(cls, folder, random_weights_seed, dtype, device)
    # Not to(dtype): that would round the rotary frequencies, which stay float32 in a model of any dtype.
    return model.to(device).requires_grad_(False).eval()


def _pretrained(cls: type, folder: Folder, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The model by ``from_pretrained``, which knows the names of old checkpoints; its files have been checked."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would stand in the middle of ours
    model, report = cls.from_pretrained(
        folder.path,
        dtype=dtype,
        device_map={"": torch.device(device)},  # straight to a GPU: several processes share the host's memory
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    assert not report["missing_keys"], report["missing_keys"]
    return model


def _randomly(cls: type, folder: Folder, seed: int, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """A model whose every weight is drawn by its name."""
    from accelerate import init_empty_weights

    # Buffers have memory: rotary frequencies are computed at construction and not in the state dict. The
    # initialisation of the weights has no effect and must not move the caller's random state.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = cls(read_config(cls, folder))
    weights = weight_files.draw_tensors(seed, shapes_of(model.state_dict()), device)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights}, strict=True, assign=True)
    return model


def with_tokenizer(folder: Path, label: str) -> Path:
    """Return the folder of a tokenizer. Raises ValueError where its files are missing or broken."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{label}: no tokenizer_config.json in {folder}; download or build it there")
    # The library takes any JSON and fails inside.
    for name, needed in (("tokenizer_config.json", set()), ("tokenizer.json", {"added_tokens", "model"})):
        if (folder / name).is_file() and (missing := needed - weight_files.read_json(folder / name, label).keys()):
            raise ValueError(f"{label}: {folder / name} has no {' and no '.join(sorted(missing))}; download it again")
    return folder


def of_equal_length(token_ids: list[list[int]], batch_size: int = 8) -> Iterator[list[int]]:
    """Yield the places of prompts that an encoder reads together, unpadded: batches of one length each."""
    by_length: dict[int, list[int]] = {}
    for place, ids in enumerate(token_ids):
        by_length.setdefault(len(ids), []).append(place)
    for places in by_length.values():
        yield from (places[i : i + batch_size] for i in range(0, len(places), batch_size))


def read_config(cls: type, folder: Folder) -> Any:
    """Return the configuration of a class of transformers from a folder's config.json."""
    from huggingface_hub.errors import StrictDataclassError

    path = folder.path / "config.json"
    weight_files.read_json(path, folder.label)
    try:
        return cls.config_class.from_pretrained(folder.path, local_files_only=True)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{folder.label}: {path} has settings that {cls.__name__} does not take: {error}") from error
