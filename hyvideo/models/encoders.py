"""Strict loading of frozen encoders: tensor names and shapes in the files are checked before
anything is loaded.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.files.files import read_json
from hyvideo.files.text import quote
from hyvideo.models.offload import device_of, loaded_on, on_device, put
from hyvideo.models.placement import Placement
from hyvideo.weights import weight_files
from hyvideo.weights.weight_files import Folder, Weights, shapes_of, with_label

_BATCH_SIZE = 8  # prompts


def class_problems(
    class_name: str,
    folder: Folder,
    weights_needed: bool = True,
    *,
    rename: Callable[[str], str] = str,
) -> list[str]:
    """Return the problems that prevent a class from loading a folder.

    ``rename`` normalizes published tensor names; "" stands for a tensor that the class does not
    read, such as one of a decoder.
    """
    config = read_config(class_name, folder)
    if not weights_needed:
        return []
    return with_label(folder, _read(class_name, config, folder, rename)[1])


def _read(
    class_name: str, config: Any, folder: Folder, rename: Callable[[str], str]
) -> tuple[Weights, list[str], dict[str, str]]:
    """Return the headers of a folder's files, their problems, and the names of the class's tensors
    by normalized name.
    """
    with torch.device("meta"):
        shapes = shapes_of(_class(class_name)(config).state_dict())
    own: dict[str, str] = {}
    for name in shapes:
        own.setdefault(rename(name), name)
    header = weight_files.read_header(folder, "model", rename)
    expected = {normalized: shapes[name] for normalized, name in own.items()}
    return header, weight_files.tensor_problems(folder, expected, header), own


def load_model(
    class_name: str,
    folder: Folder,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
    rename: Callable[[str], str] = str,
    placement: Placement = Placement.GPU,
    rotary_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Load a frozen model in eval mode, with random weights if a seed is given.

    ValueError if its files do not fit.

    ``device`` is where it computes. The rotary frequencies are rounded to ``rotary_dtype``.
    """
    place = loaded_on(placement, torch.device(device))
    if random_weights_seed is None:
        model = _pretrained(class_name, folder, dtype, place, rename)
    else:
        model = _random(class_name, folder, random_weights_seed, dtype, place)
    # Not to(dtype), which would round the rotary frequencies to the dtype of the weights.
    model = model.to(place).requires_grad_(False).eval()
    _round_rotary(model, rotary_dtype)
    # not pinned: it is used for a few prompts, and its memory is needed afterwards
    put(model, placement, torch.device(device), pinned=False)
    return model


def _pretrained(
    class_name: str,
    folder: Folder,
    dtype: torch.dtype,
    device: str | torch.device,
    rename: Callable[[str], str],
) -> nn.Module:
    """Check the files, read their tensors one by one, and build the model of them with
    ``from_pretrained``, which ties weights and computes buffers.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would interrupt the progress bar of this project
    config = read_config(class_name, folder)
    header, problems, own = _read(class_name, config, folder, rename)
    weight_files.raise_problems(folder, problems)
    # transformers keeps some modules in float32 if the model is in float16
    target = None if dtype == torch.float16 else dtype
    model, report = _class(class_name).from_pretrained(
        None,
        config=config,
        # straight to the GPU, because the processes share host memory
        state_dict={
            own[name]: tensor.to(device=device, dtype=target)
            for name, tensor in weight_files.stream_tensors(header, {}, label=folder.label)
        },
        dtype=dtype,
        device_map={"": torch.device(device)},
        output_loading_info=True,
    )
    assert not report["missing_keys"], report["missing_keys"]
    return model


def _random(
    class_name: str, folder: Folder, seed: int, dtype: torch.dtype, device: str | torch.device
) -> nn.Module:
    """Return a model with random weights, each determined by the seed and its name."""
    from accelerate import init_empty_weights

    # Buffers are allocated because rotary frequencies are computed at construction and are not in
    # the state dict. The initial weights are replaced below; creating them must not change the
    # caller's random state.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model = _class(class_name)(read_config(class_name, folder))
    weights = weight_files.draw_tensors(seed, shapes_of(model.state_dict()), device)
    model.load_state_dict(
        {name: weight.to(dtype) for name, weight in weights}, strict=True, assign=True
    )
    return model


def _round_rotary(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the rotary frequencies, which transformers computes in float32, to ``dtype``; they stay
    float32 tensors.
    """
    for name, frequencies in model.named_buffers():
        if name.endswith("inv_freq"):
            frequencies.copy_(frequencies.to(dtype))


def find_tokenizer(folder: Path, label: str) -> Path:
    """Return ``folder`` after checking its tokenizer.

    Raises ValueError if there is none.
    """
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(
            f"{label}: no tokenizer_config.json in {folder}; download or build the tokenizer"
        )
    return folder


def load_tokenizer(folder: Path, class_name: str = "AutoTokenizer") -> Any:
    return _class(class_name).from_pretrained(folder, local_files_only=True)


class PromptEncoder:
    """Encoder of prompts into hidden states; a subclass defines ``_token_ids(prompt)`` and
    ``_states(ids)``.
    """

    def __init__(self, tokenizer, model: nn.Module):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        _check_vocabulary(len(tokenizer), model.get_input_embeddings().num_embeddings)
        self.tokenizer = tokenizer
        self.model = model

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> list[Tensor]:
        """Return each prompt's states (tokens, dim) on the CPU.

        Prompts of equal length are batched, unpadded.
        """
        token_ids = [self._token_ids(prompt) for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(token_ids):
            by_length.setdefault(len(ids), []).append(index)
        states: dict[int, Tensor] = {}
        for indices in by_length.values():
            for start in range(0, len(indices), _BATCH_SIZE):
                batch = indices[start : start + _BATCH_SIZE]
                ids = torch.tensor(
                    [token_ids[index] for index in batch], device=device_of(self.model)
                )
                with on_device(self.model):
                    encoded = self._states(ids).cpu()
                states |= {index: row.clone() for index, row in zip(batch, encoded)}
        return [states[index] for index in range(len(prompts))]

    def _warn_of_truncation(
        self, num_tokens: int, limit: int, dropped: list[int], template: str = ""
    ) -> None:
        text = self.tokenizer.decode(dropped, skip_special_tokens=True).removesuffix(template)
        warn_of_truncation("a prompt", num_tokens, limit, text)


def _check_vocabulary(num_tokens: int, num_rows: int) -> None:
    """Raise ValueError for a tokenizer of another model.

    Embeddings may be padded: by less than 1 %, or to a multiple of 64 with less than 128 rows more.
    """
    padding = num_rows - num_tokens
    is_padded = padding < 0.01 * num_rows or (num_rows % 64 == 0 and padding < 128)
    if padding < 0 or not is_padded:
        raise ValueError(
            f"the tokenizer has {num_tokens:,} tokens, but the text encoder's embedding has "
            f"{num_rows:,} rows, so it belongs to another model; download the tokenizer again"
        )


def warn_of_truncation(what: str, num_tokens: int, limit: int, dropped: str) -> None:
    """Warn that an encoder does not read ``dropped``, the end of a text."""
    rest = quote(dropped.strip())
    warnings.warn(
        f"{what} has {num_tokens} tokens, but the model reads at most {limit}; truncated text: "
        f"{rest}",
        stacklevel=3,
    )


def rename_t5(name: str) -> str:
    """Return one name for T5's token embedding, which files store under either of two names or
    under both, and "" for the decoder.
    """
    if name.startswith(("decoder.", "lm_head.")):
        return ""
    return "shared.weight" if name == "encoder.embed_tokens.weight" else name


def read_config(class_name: str, folder: Folder) -> Any:
    """Load the configuration of a class from a folder's config.json."""
    from huggingface_hub.errors import StrictDataclassError

    path = folder.path / "config.json"
    read_json(path, folder.label)
    try:
        return _class(class_name).config_class.from_pretrained(folder.path, local_files_only=True)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder.label}: {path} has settings that {class_name} does not accept: {error}"
        ) from error


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)
