"""Transformer, VAE and text encoder from a folder of weights, in the original layout or in diffusers'.

Two layouts, told apart by what lies there:

    original    root/transformer/<version>/{config.json, diffusion_pytorch_model.safetensors}
                root/vae/{config.json, diffusion_pytorch_model.safetensors}
                root/text_encoder/llm/                        a transformers folder with its tokenizer
    diffusers   root/{transformer, vae, text_encoder, tokenizer}/, weights perhaps in several files

A config.json whose ``_class_name`` is diffusers' has diffusers' names; the original's files carry a
``_class_name`` too, another one. A folder that ``save_pretrained`` wrote for a transformer alone can stand
for the root.

Nothing is loaded loosely. The model is built without memory (on the meta device), its tensors are compared
with the headers of the files, and only when every name and shape agrees are the tensors read, into the dtype
and onto the device asked for. `check_checkpoint` does the same comparison without reading, for the start of a
program.

A compact checkpoint may leave out tensors that are random and never trained. The metadata of its file then
has a key ``drawn``, a JSON object {prefix: seed}, and `draw_tensor` makes them again; it also makes whole
random models.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.models.original_checkpoint import (
    transformer_config_to_diffusers,
    transformer_config_to_original,
    transformer_to_diffusers,
    transformer_to_original,
    vae_config_to_diffusers,
    vae_config_to_original,
    vae_to_diffusers,
    vae_to_original,
)

# diffusers and transformers take seconds to import; checks and --help should not wait for them.
if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLTextModel

Shapes = dict[str, tuple[int, ...]]

_DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
_TRANSFORMERS_WEIGHTS = "model"
_NUM_PROBLEMS_SHOWN = 10
# Settings of the transformer that its forward pass does not read.
_NOTES = {"target_size", "task_type"}


class _Component(NamedTuple):
    """A diffusers class, and the ways between it and the original's files."""

    class_name: str
    to_diffusers: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    to_original: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    config_to_diffusers: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_original: Callable[[Mapping[str, Any]], dict[str, Any]]


_TRANSFORMER = _Component(
    "HunyuanVideo15Transformer3DModel",
    transformer_to_diffusers,
    transformer_to_original,
    transformer_config_to_diffusers,
    transformer_config_to_original,
)
_VAE = _Component(
    "AutoencoderKLHunyuanVideo15",
    vae_to_diffusers,
    vae_to_original,
    vae_config_to_diffusers,
    vae_config_to_original,
)


class _Folder(NamedTuple):
    """Where a component lies, and how messages call it."""

    path: Path
    label: str


class _Weights(NamedTuple):
    """What the headers of a folder's weight files say."""

    shapes: Shapes
    files: dict[str, Path]  # tensor name -> the file that holds it
    drawn: dict[str, int]  # prefix of tensor names -> seed


def load_transformer(
    root: str | Path,
    version: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> "HunyuanVideo15Transformer3DModel":
    """The diffusers transformer, in eval mode, its parameters trainable.

    Args:
        root: Folder of either layout, or a folder that ``save_pretrained`` wrote for a transformer.
        version: Name of the transformer in the original layout (``480p_t2v``); the other two hold a single
            one, and the name is not needed.
        random_weights_seed: Makes a random model from config.json alone, the same one on every machine.

    Raises:
        ValueError: Something is missing, broken or does not fit, naming the tensor, the file and the version.
    """
    folder = _transformer_folder(Path(root), version)
    return _load(_TRANSFORMER, folder, dtype=dtype, device=device, random_weights_seed=random_weights_seed)


def load_vae(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> "AutoencoderKLHunyuanVideo15":
    """The diffusers VAE, in eval mode, able to take batches.

    ``vae.config.scaling_factor`` is the checkpoint's: the transformer sees latents times this factor.

    Raises:
        ValueError: As `load_transformer`.
    """
    from hyvideo.models.attention import install_causal_mask

    vae = _load(_VAE, _vae_folder(Path(root)), dtype=dtype, device=device, random_weights_seed=random_weights_seed)
    install_causal_mask(vae)
    return vae


def load_text_encoder(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> tuple["PreTrainedTokenizerBase", "Qwen2_5_VLTextModel"]:
    """The tokenizer and the language model of Qwen2.5-VL, frozen and in eval mode.

    The vision tower of a full Qwen2.5-VL checkpoint is left unread; its published names (``model.layers``)
    and the newer ones are both understood.

    Raises:
        ValueError: As `load_transformer`.
    """
    from transformers import AutoTokenizer, Qwen2_5_VLTextModel

    folder, tokenizer_folder = _text_encoder_folders(Path(root))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    if random_weights_seed is not None:
        model = _random_text_encoder(folder, random_weights_seed, dtype)
    else:
        _refuse(folder, _text_encoder_problems(folder))
        # transformers knows how to rename old checkpoints; that it found everything was just made sure of.
        model, report = Qwen2_5_VLTextModel.from_pretrained(
            folder.path, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        assert not report["missing_keys"], report["missing_keys"]
    # Not to(dtype): that would round the rotary frequencies, which stay float32 in a model of any dtype.
    return tokenizer, model.to(device).requires_grad_(False).eval()


def load_transformer_weights(transformer: nn.Module, folder: str | Path) -> None:
    """Copies the weights that ``save_pretrained`` wrote to `folder` into `transformer`.

    Its dtype and device stay. Its tensors must be whole: load before it is sharded or given adapters.

    Raises:
        ValueError: A tensor or a setting of the folder is not the transformer's.
    """
    source = _Folder(Path(folder), "transformer weights")
    arguments, is_original = _read_arguments(_TRANSFORMER, source)
    _refuse(source, _setting_problems(_plain(transformer.config), arguments, ignored=_NOTES))
    expected = _expected_shapes(_TRANSFORMER, transformer, is_original)
    weights = _read_header(source, _DIFFUSERS_WEIGHTS)
    _refuse(source, _tensor_problems(source, expected, weights))
    state = _read_tensors(weights) | _draw_missing(expected, weights)
    transformer.load_state_dict(transformer_to_diffusers(state) if is_original else state, strict=True)


def save_transformer_original(
    transformer: nn.Module,
    folder: str | Path,
    *,
    drawn: Mapping[str, int] | Iterable[tuple[str, int]] = (),
    dtype: torch.dtype = torch.float16,
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the transformer to `folder` (``root/transformer/<version>``) in the original layout.

    Args:
        drawn: Prefix of original tensor names -> seed. These tensors are left out of the file; they must be
            what `draw_tensor` gives for the seed, as in a model loaded with that ``random_weights_seed``.
        config_extra: More keys for config.json; they may say anything that does not change the model.

    Raises:
        ValueError: The original layout cannot express the model, a tensor to leave out is not the drawn one,
            or a weight is too large for `dtype`.
    """
    _save_original(_TRANSFORMER, transformer, Path(folder), dict(drawn), dtype, dict(config_extra or {}))


def save_vae_original(
    vae: nn.Module,
    folder: str | Path,
    *,
    drawn: Mapping[str, int] | Iterable[tuple[str, int]] = (),
    dtype: torch.dtype = torch.float16,
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the VAE to `folder` (``root/vae``) in the original layout; as `save_transformer_original`."""
    _save_original(_VAE, vae, Path(folder), dict(drawn), dtype, dict(config_extra or {}))


def check_checkpoint(root: str | Path, version: str | None, *, weights_needed: bool = True) -> list[str]:
    """What would keep transformer, VAE and text encoder from loading, in sentences; empty when nothing would.

    Reads configs and the headers of the weight files only, a second or two for the full-size model.

    Args:
        weights_needed: False checks what ``random_weights_seed`` needs: the configs and the tokenizer.
    """
    root = Path(root)
    return [
        *_problems(lambda: _model_problems(_TRANSFORMER, _transformer_folder(root, version), weights_needed)),
        *_problems(lambda: _model_problems(_VAE, _vae_folder(root), weights_needed)),
        *_problems(lambda: _text_encoder_problems(_text_encoder_folders(root)[0], weights_needed)),
    ]


def draw_tensor(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The random float32 weight that belongs to a seed and a tensor's name; every CPU draws the same bits.

    Matrices and kernels are normal with variance 1 / fan-in, embeddings of tokens standard normal, scales of
    norms one, biases zero. Nothing is zero that a signal must pass: gates and the last projection are drawn
    as well.

    Args:
        name: The name in the original checkpoint, so that both layouts of a model are the same model.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1 or name.endswith(".gamma"):
        return torch.ones(shape)
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    fan_in = 1 if name.endswith("embed_tokens.weight") else math.prod(shape[1:])
    # In double precision: a tail value may differ in its last bit between C libraries, and rounding hides it.
    return torch.from_numpy((generator.standard_normal(shape) / math.sqrt(fan_in)).astype(np.float32))


def _load(
    component: _Component,
    folder: _Folder,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    random_weights_seed: int | None,
) -> nn.Module:
    model, is_original = _build_without_memory(component, folder)
    if random_weights_seed is not None:
        is_original = True
        shapes = _shapes(component.to_original(model.state_dict()))
        state = {name: draw_tensor(random_weights_seed, name, shape) for name, shape in shapes.items()}
    else:
        expected = _expected_shapes(component, model, is_original)
        weights = _read_header(folder, _DIFFUSERS_WEIGHTS)
        _refuse(folder, _tensor_problems(folder, expected, weights))
        state = _read_tensors(weights) | _draw_missing(expected, weights)
    # A copy even where the dtype is the file's: what is memory-mapped would die with a file that is
    # overwritten.
    state = {name: tensor.to(device=device, dtype=dtype, copy=True) for name, tensor in state.items()}
    model.load_state_dict(component.to_diffusers(state) if is_original else state, strict=True, assign=True)
    tensors = chain(model.named_parameters(), model.named_buffers())
    assert not any(tensor.is_meta for _, tensor in tensors), "a tensor outside the state dict was left without memory"
    return model.eval()


def _build_without_memory(component: _Component, folder: _Folder) -> tuple[nn.Module, bool]:
    """The model on the meta device, and whether the folder is in the original layout."""
    import diffusers

    arguments, is_original = _read_arguments(component, folder)
    with torch.device("meta"):
        return getattr(diffusers, component.class_name)(**arguments), is_original


def _random_text_encoder(folder: _Folder, seed: int, dtype: torch.dtype) -> nn.Module:
    from transformers import Qwen2_5_VLTextModel

    # Built with memory: the rotary frequencies are computed at construction and not in the state dict. The
    # first initialisation is thrown away and must not move the caller's random state.
    with torch.random.fork_rng(devices=[]):
        model = Qwen2_5_VLTextModel(_text_config(folder))
    shapes = _shapes(model.state_dict())
    state = {name: draw_tensor(seed, name, shape).to(dtype) for name, shape in shapes.items()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def _text_config(folder: _Folder) -> Any:
    from transformers import Qwen2_5_VLTextModel

    _read_json(folder.path / "config.json", folder.label)
    return Qwen2_5_VLTextModel.config_class.from_pretrained(folder.path, local_files_only=True)


def _save_original(
    component: _Component,
    model: nn.Module,
    folder: Path,
    drawn: dict[str, int],
    dtype: torch.dtype,
    config_extra: dict[str, Any],
) -> None:
    config = component.config_to_original(model.config) | config_extra
    target = _Folder(folder, f"saving {component.class_name}")
    _refuse(target, _setting_problems(_plain(model.config), component.config_to_diffusers(config)))
    tensors = {}
    for name, tensor in component.to_original(model.state_dict()).items():
        seed = _seed_for(name, drawn)
        if seed is None:
            tensors[name] = _stored(name, tensor, dtype)
        elif not torch.equal(tensor.cpu(), draw_tensor(seed, name, tuple(tensor.shape)).to(tensor.dtype)):
            raise ValueError(f"tensor {name!r} is not what seed {seed} draws; take its prefix out of drawn")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # Renamed into place: the file may be the one that is being read, here or in another process.
    path = folder / f"{_DIFFUSERS_WEIGHTS}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"} | ({"drawn": json.dumps(drawn)} if drawn else {}))
    os.replace(partial, path)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    if not stored.isfinite().all():
        raise ValueError(f"tensor {name!r} has values that are not finite in {dtype}; save with dtype=torch.float32")
    return stored


def _transformer_folder(root: Path, version: str | None) -> _Folder:
    label = f"transformer version {version!r}"
    versions = root / "transformer"
    for folder in ([versions / version] if version else []) + [versions]:
        if (folder / "config.json").is_file():
            return _Folder(folder, label)
    if versions.is_dir():
        found = sorted(path.parent.name for path in versions.glob("*/config.json"))
        raise ValueError(f"{label}: {versions} has no such folder with a config.json; versions there: {found}")
    if (root / "config.json").is_file():
        return _Folder(root, label)
    raise ValueError(f"{label}: {root} has neither a folder transformer nor a config.json; set pretrained_model_root")


def _vae_folder(root: Path) -> _Folder:
    return _Folder(root / "vae", "VAE")


def _text_encoder_folders(root: Path) -> tuple[_Folder, Path]:
    """The folder of the language model and that of its tokenizer."""
    llm = root / "text_encoder" / "llm"
    folder, tokenizer = (llm, llm) if llm.is_dir() else (root / "text_encoder", root / "tokenizer")
    if not (tokenizer / "tokenizer_config.json").is_file():
        raise ValueError(f"text encoder: no tokenizer_config.json in {tokenizer}; download or build it there")
    return _Folder(folder, "text encoder"), tokenizer


def _read_arguments(component: _Component, folder: _Folder) -> tuple[dict[str, Any], bool]:
    """Constructor arguments from the folder's config.json, and whether it is in the original's words."""
    path = folder.path / "config.json"
    config = _read_json(path, folder.label)
    try:
        if config.get("_class_name") != component.class_name:
            return component.config_to_diffusers(config), True
        return _diffusers_arguments(component, config), False
    except ValueError as error:
        raise ValueError(f"{folder.label}: {path}: {error}") from error


def _diffusers_arguments(component: _Component, config: dict[str, Any]) -> dict[str, Any]:
    """A diffusers config without its notes; absent keys take the class's defaults, as in ``from_config``."""
    import inspect

    import diffusers

    arguments = _plain(config)
    parameters = inspect.signature(getattr(diffusers, component.class_name)).parameters
    if unknown := sorted(set(arguments) - set(parameters)):
        raise ValueError(f"config keys {unknown} are not settings of diffusers' {component.class_name}")
    return {name: parameter.default for name, parameter in parameters.items()} | arguments


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A diffusers config without the keys that only describe it, lists as tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config.items()
        if not key.startswith("_")
    }


def _read_json(path: Path, label: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{label}: {path} does not exist")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{label}: {path} is not JSON ({error})") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{label}: {path} must hold a JSON object, got {type(content).__name__}")


def _read_header(folder: _Folder, stem: str) -> _Weights:
    """Names and shapes of the folder's tensors, from ``<stem>.safetensors`` or the files of its index."""
    shapes: Shapes = {}
    files: dict[str, Path] = {}
    drawn: dict[str, int] = {}
    for path in _weight_files(folder, stem):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
                files |= dict.fromkeys(names, path)
                drawn |= _drawn_prefixes(file.metadata() or {})
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{folder.label}: {path} is truncated or no safetensors file ({error}); download it again"
            ) from error
    return _Weights(shapes, files, drawn)


def _drawn_prefixes(metadata: Mapping[str, str]) -> dict[str, int]:
    return {prefix: int(seed) for prefix, seed in json.loads(metadata.get("drawn", "{}")).items()}


def _weight_files(folder: _Folder, stem: str) -> list[Path]:
    whole = folder.path / f"{stem}.safetensors"
    index = folder.path / f"{stem}.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(f"{folder.label}: neither {whole.name} nor {index.name} exists in {folder.path}")
    weight_map = _read_json(index, folder.label).get("weight_map")
    if not weight_map:
        raise ValueError(f"{folder.label}: {index} has no weight_map; download it again")
    paths = [folder.path / name for name in sorted(set(weight_map.values()))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{folder.label}: {index.name} names {missing}, which are not in {folder.path}")
    return paths


def _read_tensors(weights: _Weights) -> dict[str, Tensor]:
    """All tensors of the files, memory-mapped."""
    tensors = {}
    for path in sorted(set(weights.files.values())):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def _draw_missing(expected: Shapes, weights: _Weights) -> dict[str, Tensor]:
    """The tensors that the files leave to be drawn; `_tensor_problems` has made sure that each has a seed."""
    return {
        name: draw_tensor(_seed_for(name, weights.drawn), name, shape)
        for name, shape in expected.items()
        if name not in weights.shapes
    }


def _seed_for(name: str, drawn: Mapping[str, int]) -> int | None:
    return next((seed for prefix, seed in drawn.items() if name.startswith(prefix)), None)


def _shapes(state_dict: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def _expected_shapes(component: _Component, model: nn.Module, is_original: bool) -> Shapes:
    """Names and shapes that the model's file must have."""
    own = model.state_dict()
    return _shapes(component.to_original(own) if is_original else own)


def _tensor_problems(folder: _Folder, expected: Shapes, weights: _Weights) -> list[str]:
    """Every tensor that is missing, unexpected or of another shape than the model's."""
    problems = []
    where = ", ".join(sorted({path.name for path in weights.files.values()})) or "the weight file"
    for name in sorted(set(expected) | set(weights.shapes)):
        if name not in expected:
            problem = f"is unexpected, the model of {folder.path / 'config.json'} has none"
            problems.append(f"tensor {name!r} in {weights.files[name]} {problem}")
        elif name in weights.shapes and weights.shapes[name] != expected[name]:
            problem = f"has shape {weights.shapes[name]}, the model needs {expected[name]}"
            problems.append(f"tensor {name!r} in {weights.files[name]} {problem}")
        elif name not in weights.shapes and _seed_for(name, weights.drawn) is None:
            problems.append(f"tensor {name!r} of shape {expected[name]} is missing in {folder.path / where}")
    return problems


def _setting_problems(own: Mapping[str, Any], other: Mapping[str, Any], ignored: Iterable[str] = ()) -> list[str]:
    return [
        f"{key} is {own.get(key)!r} in the model and {other.get(key)!r} in config.json"
        for key in sorted((set(own) | set(other)) - set(ignored))
        if own.get(key) != other.get(key)
    ]


def _model_problems(component: _Component, folder: _Folder, weights_needed: bool) -> list[str]:
    model, is_original = _build_without_memory(component, folder)
    if not weights_needed:
        return []
    weights = _read_header(folder, _DIFFUSERS_WEIGHTS)
    problems = _tensor_problems(folder, _expected_shapes(component, model, is_original), weights)
    return [f"{folder.label}: {problem}" for problem in _shortened(problems)]


def _text_encoder_problems(folder: _Folder, weights_needed: bool = True) -> list[str]:
    """As `_model_problems`; the vision tower and the output head of a full Qwen2.5-VL are no problem."""
    from transformers import Qwen2_5_VLTextModel

    config = _text_config(folder)
    if not weights_needed:
        return []
    with torch.device("meta"):
        expected = _shapes(Qwen2_5_VLTextModel(config).state_dict())
    weights = _read_header(folder, _TRANSFORMERS_WEIGHTS)
    own_name = {name: _text_model_name(name) for name in weights.shapes}
    text_only = _Weights(
        {own_name[name]: shape for name, shape in weights.shapes.items() if own_name[name] in expected},
        {own_name[name]: path for name, path in weights.files.items()},
        drawn={},
    )
    problems = _tensor_problems(folder, expected, text_only)
    return [f"{folder.label}: {problem}" for problem in _shortened(problems)]


def _text_model_name(name: str) -> str:
    """The name in Qwen2_5_VLTextModel of a tensor of Qwen2.5-VL, published under several prefixes."""
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _problems(check: Callable[[], list[str]]) -> list[str]:
    """What `check` finds, or what kept it from looking."""
    try:
        return check()
    except ValueError as error:
        return [str(error)]


def _refuse(folder: _Folder, problems: list[str]) -> None:
    """Raises one ValueError for a list of problems, if there are any."""
    if problems:
        listed = "\n  ".join(_shortened(problems))
        raise ValueError(f"{folder.label}: {folder.path} does not fit:\n  {listed}")


def _shortened(problems: list[str]) -> list[str]:
    """The list cut where nobody reads on: a checkpoint of another model differs in a thousand tensors."""
    more = len(problems) - _NUM_PROBLEMS_SHOWN
    return problems if more <= 0 else [*problems[:_NUM_PROBLEMS_SHOWN], f"and {more} more"]
