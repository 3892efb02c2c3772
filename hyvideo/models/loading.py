"""Transformer and VAE from a folder of weights, in the original layout or in diffusers'.

Two layouts, told apart by what lies there (the encoders' part of them is in ``encoders``):

    original    root/transformer/<version>/{config.json, diffusion_pytorch_model.safetensors}
                root/vae/{config.json, diffusion_pytorch_model.safetensors}
    diffusers   root/{transformer, vae}/, weights perhaps in several files

A config.json whose ``_class_name`` is diffusers' has diffusers' names; the original's files carry a
``_class_name`` too, another one. A folder that ``save_pretrained`` wrote for a transformer alone can stand
for the root.

Nothing is loaded loosely. The model is built without memory (on the meta device), its tensors are compared
with the headers of the files, and only when every name and shape agrees are the tensors read, one after another,
into the dtype and onto the device asked for. `check_checkpoint` does the same comparison without reading, for the
start of a program.

A compact checkpoint may leave out tensors that are random and never trained. The metadata of its file then
has a key ``drawn``, a JSON object {prefix: seed}, and `draw_tensor` makes them again; it also makes whole
random models.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.models import loading_encoders as encoders
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
from hyvideo.models.versions import PIPELINE_TASKS
from hyvideo.models.weight_files import (
    Folder,
    Shapes,
    draw_tensor,
    problems_of,
    read_header,
    read_json,
    refuse,
    seed_for,
    shapes_of,
    shortened,
    stream_tensors,
    tensor_problems,
)

# diffusers takes seconds to import; checks and --help should not wait for them.
if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

_DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
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


def transformer_without_memory(root: str | Path, version: str | None) -> "HunyuanVideo15Transformer3DModel":
    """The transformer on the meta device: names and shapes, no weights."""
    return _build_without_memory(_TRANSFORMER, _transformer_folder(Path(root), version))[0]


def transformer_of(path: Path) -> "HunyuanVideo15Transformer3DModel":
    """The transformer that a JSON file of diffusers' settings describes, on the meta device."""
    import diffusers

    settings = read_json(path, "transformer")
    with torch.device("meta"):
        return diffusers.HunyuanVideo15Transformer3DModel(**_diffusers_arguments(_TRANSFORMER, settings))


def stream_transformer(
    root: str | Path, version: str | None, *, read: bool = True, random_weights_seed: int | None = None
) -> tuple["HunyuanVideo15Transformer3DModel", Iterator[tuple[str, Tensor]]]:
    """The transformer without memory, and its weights one after another under the model's names: to fill shards.

    Args:
        read: False gives weights without memory, in the same order, for a rank that gets the values from another.
        random_weights_seed: As of `load_transformer`; every rank draws, whatever ``read`` says.

    Raises:
        ValueError: As `load_transformer`; from the iterator, before the first weight.
    """
    folder = _transformer_folder(Path(root), version)
    model, is_original = _build_without_memory(_TRANSFORMER, folder)
    model.eval()
    # Names and shapes as they are now: the caller may change the model before it takes the first weight.
    shapes = model.state_dict()
    if random_weights_seed is not None:
        return model, _drawn_state(_TRANSFORMER, shapes, random_weights_seed)
    return model, _stream_state(_TRANSFORMER, folder, shapes, is_original, read=read)


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


def load_transformer_weights(transformer: nn.Module, folder: str | Path) -> None:
    """Copies the weights that ``save_pretrained`` wrote to `folder` into `transformer`.

    Its dtype and device stay. Its tensors must be whole: load before it is sharded or given adapters.

    Raises:
        ValueError: A tensor or a setting of the folder is not the transformer's.
    """
    source, is_original = _weights_for(transformer, folder)
    targets = transformer.state_dict()
    for name, tensor in _stream_state(_TRANSFORMER, source, targets, is_original):
        targets[name].copy_(tensor)


def check_transformer_weights(root: str | Path, version: str | None, folder: str | Path) -> None:
    """Raises the ValueError that `load_transformer_weights` would; reads headers only."""
    transformer = transformer_without_memory(root, version)
    source, is_original = _weights_for(transformer, folder)
    expected = _expected_shapes(_TRANSFORMER, transformer.state_dict(), is_original)
    refuse(source, tensor_problems(source, expected, read_header(source, _DIFFUSERS_WEIGHTS)))


def _weights_for(transformer: nn.Module, folder: str | Path) -> tuple[Folder, bool]:
    """The folder, once its settings are known to be the transformer's, and whether it is in the original layout."""
    source = Folder(Path(folder), "transformer weights")
    arguments, is_original = _read_arguments(_TRANSFORMER, source)
    refuse(source, _setting_problems(_plain(transformer.config), arguments, ignored=_NOTES))
    return source, is_original


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


def check_checkpoint(
    root: str | Path,
    version: str | None,
    *,
    weights_needed: bool = True,
    with_glyphs: bool = False,
    with_images: bool = False,
) -> list[str]:
    """What would keep the parts of a run from loading, in sentences; empty when nothing would.

    Reads configs and the headers of the weight files only, a second or two for the full-size model.

    Args:
        weights_needed: False checks what ``random_weights_seed`` needs: the configs and the tokenizers.
        with_glyphs, with_images: The run has text in quotes, reference images, and needs their encoders.
    """
    root = Path(root)
    checks = [
        lambda: transformer_problems(root, version, weights_needed),
        lambda: vae_problems(root, weights_needed),
        lambda: encoders.text_encoder_problems(root, weights_needed),
        *([lambda: encoders.glyph_encoder_problems(root, weights_needed)] if with_glyphs else []),
        *([lambda: encoders.vision_encoder_problems(root, weights_needed)] if with_images else []),
    ]
    return [problem for check in checks for problem in problems_of(check)]


def transformer_problems(root: str | Path, version: str | None, weights_needed: bool = True) -> list[str]:
    """What keeps the transformer from loading, from its config and the headers of its files."""
    return _model_problems(_TRANSFORMER, _transformer_folder(Path(root), version), weights_needed)


def vae_problems(root: str | Path, weights_needed: bool = True) -> list[str]:
    """What keeps the VAE from loading."""
    return _model_problems(_VAE, _vae_folder(Path(root)), weights_needed)


def read_task(root: str | Path, version: str | None) -> str | None:
    """``t2v`` or ``i2v``, what the transformer was trained for as its files say; None where they do not say.

    A diffusers pipeline's model_index.json comes before config.json, which is wrong on the hub (``PIPELINE_TASKS``).

    Raises:
        ValueError: There is no config.json, or a file is no JSON.
    """
    folder = _transformer_folder(Path(root), version)
    config = read_json(folder.path / "config.json", folder.label)
    index = folder.path.parent / "model_index.json"
    if index.is_file():
        pipeline = read_json(index, folder.label).get("_class_name")
        if isinstance(pipeline, str) and pipeline in PIPELINE_TASKS:
            return PIPELINE_TASKS[pipeline]
    return config.get("ideal_task", config.get("task_type"))


def read_num_heads(root: str | Path, version: str | None) -> int:
    """Attention heads of the transformer, from its config.json."""
    arguments, _ = _read_arguments(_TRANSFORMER, _transformer_folder(Path(root), version))
    return arguments["num_attention_heads"]


def size_problems(root: str | Path, version: str | None, *, num_frames: int, height: int, width: int) -> list[str]:
    """Why the models of a folder cannot make videos of this size; empty when they can. Reads the configs only."""
    transformer, _ = _read_arguments(_TRANSFORMER, _transformer_folder(Path(root), version))
    vae, _ = _read_arguments(_VAE, _vae_folder(Path(root)))
    multiple = vae["spatial_compression_ratio"] * transformer["patch_size"]
    temporal = vae["temporal_compression_ratio"]
    problems = []
    if height % multiple or width % multiple:
        problems.append(f"height and width must be multiples of {multiple}, got {height} x {width}")
    if num_frames % temporal != 1:
        problems.append(f"the number of frames must be {temporal}n + 1, got {num_frames}")
    return problems


def _load(
    component: _Component,
    folder: Folder,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    random_weights_seed: int | None,
) -> nn.Module:
    model, is_original = _build_without_memory(component, folder)
    if random_weights_seed is None:
        tensors = _stream_state(component, folder, model.state_dict(), is_original)
    else:
        tensors = _drawn_state(component, model.state_dict(), random_weights_seed)
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}
    model.load_state_dict(state, strict=True, assign=True)
    tensors = chain(model.named_parameters(), model.named_buffers())
    assert not any(tensor.is_meta for _, tensor in tensors), "a tensor outside the state dict was left without memory"
    return model.eval()


def _stream_state(
    component: _Component, folder: Folder, own: dict[str, Tensor], is_original: bool, *, read: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors under the model's names, one after another, once all names and shapes are known to fit."""
    expected = _expected_shapes(component, own, is_original)
    weights = read_header(folder, _DIFFUSERS_WEIGHTS)
    refuse(folder, tensor_problems(folder, expected, weights))
    for name, tensor in stream_tensors(weights, expected, read=read):
        # Both maps work tensor by tensor: one of the original's is one or three of diffusers'.
        yield from (component.to_diffusers({name: tensor}) if is_original else {name: tensor}).items()


def _drawn_state(component: _Component, own: dict[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random tensors for the model, drawn by their original names."""
    for name, shape in _expected_shapes(component, own, is_original=True).items():
        yield from component.to_diffusers({name: draw_tensor(seed, name, shape)}).items()


def _build_without_memory(component: _Component, folder: Folder) -> tuple[nn.Module, bool]:
    """The model on the meta device, and whether the folder is in the original layout."""
    import diffusers

    arguments, is_original = _read_arguments(component, folder)
    with torch.device("meta"):
        return getattr(diffusers, component.class_name)(**arguments), is_original


def _save_original(
    component: _Component,
    model: nn.Module,
    folder: Path,
    drawn: dict[str, int],
    dtype: torch.dtype,
    config_extra: dict[str, Any],
) -> None:
    config = component.config_to_original(model.config) | config_extra
    target = Folder(folder, f"saving {component.class_name}")
    refuse(target, _setting_problems(_plain(model.config), component.config_to_diffusers(config)))
    tensors = {}
    for name, tensor in component.to_original(model.state_dict()).items():
        seed = seed_for(name, drawn)
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


def _transformer_folder(root: Path, version: str | None) -> Folder:
    label = f"transformer version {version!r}"
    versions = root / "transformer"
    for folder in ([versions / version] if version else []) + [versions]:
        if (folder / "config.json").is_file():
            return Folder(folder, label)
    if versions.is_dir():
        found = sorted(path.parent.name for path in versions.glob("*/config.json"))
        raise ValueError(f"{label}: {versions} has no such folder with a config.json; versions there: {found}")
    if (root / "config.json").is_file():
        return Folder(root, label)
    raise ValueError(f"{label}: {root} has neither a folder transformer nor a config.json; set pretrained_model_root")


def _vae_folder(root: Path) -> Folder:
    return Folder(root / "vae", "VAE")


def _read_arguments(component: _Component, folder: Folder) -> tuple[dict[str, Any], bool]:
    """Constructor arguments from the folder's config.json, and whether it is in the original's words."""
    path = folder.path / "config.json"
    config = read_json(path, folder.label)
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


def _expected_shapes(component: _Component, own: dict[str, Tensor], is_original: bool) -> Shapes:
    """Names and shapes that a model's file must have, from its own state."""
    return shapes_of(component.to_original(own) if is_original else own)


def _setting_problems(own: Mapping[str, Any], other: Mapping[str, Any], ignored: Iterable[str] = ()) -> list[str]:
    return [
        f"{key} is {own.get(key)!r} in the model and {other.get(key)!r} in config.json"
        for key in sorted((set(own) | set(other)) - set(ignored))
        if own.get(key) != other.get(key)
    ]


def _model_problems(component: _Component, folder: Folder, weights_needed: bool) -> list[str]:
    model, is_original = _build_without_memory(component, folder)
    if not weights_needed:
        return []
    weights = read_header(folder, _DIFFUSERS_WEIGHTS)
    problems = tensor_problems(folder, _expected_shapes(component, model.state_dict(), is_original), weights)
    return [f"{folder.label}: {problem}" for problem in shortened(problems)]
