"""Transformer and VAE from a folder of weights, in the original layout or in diffusers'.

    original    root/transformer/<version>/{config.json, diffusion_pytorch_model.safetensors}
                root/vae/{config.json, diffusion_pytorch_model.safetensors}
    diffusers   root/{transformer, vae}/, weights perhaps in several files

The ``_class_name`` of a config.json decides whose names it has. A folder that ``save_pretrained`` wrote for a
transformer alone can stand for the root.

The model is built without memory (on the meta device), its tensors are compared with the headers of the files, and
only when every name and shape agrees are the tensors read, one after another. A compact checkpoint may leave out
tensors that are random and never trained: the metadata of its file then has a key ``drawn``, a JSON object
{prefix: seed}, and `weight_files.draw_tensor` makes them again.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.models import weight_files
from hyvideo.models.family import Component, Family, family_of, family_of_config, new_model
from hyvideo.models.lora import Lora, with_changes
from hyvideo.models.versions import version_defaults
from hyvideo.models.weight_files import Folder, Shapes

WEIGHTS_STEM = "diffusion_pytorch_model"


def load_transformer(
    root: str | Path,
    version: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **how: Any,
) -> nn.Module:
    """The diffusers transformer, in eval mode, its parameters trainable; ``how`` is that of `stream_transformer`.

    Raises ValueError where something is missing, broken or does not fit, naming the tensor, the file and the version.
    """
    return _filled(*stream_transformer(root, version, device=device, **how), dtype, device)


def transformer_without_memory(root: str | Path, version: str | None) -> nn.Module:
    """The transformer on the meta device: names and shapes, no weights."""
    folder = transformer_folder(root, version)
    return build_without_memory(read_family(folder).transformer, folder)[0]


def transformer_of(path: Path) -> nn.Module:
    """The transformer that a JSON file of diffusers' settings describes, on the meta device."""
    config = weight_files.read_json(path, "transformer")
    component = family_of_config(config, "transformer").transformer
    with torch.device("meta"):
        return new_model(component, _diffusers_arguments(component, config))


def stream_transformer(
    root: str | Path,
    version: str | None,
    *,
    read: bool = True,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
    lora: Lora | None = None,
) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """The transformer without memory, and its weights one after another under the model's names: to fill shards.

    Weights that are read come on the CPU; a large model's random ones are drawn on ``device``. The iterator raises
    ValueError as `load_transformer`, before the first weight.

    Args:
        version: Name of the transformer in the original layout (``480p_t2v``); other folders hold a single one.
        read: False gives weights without memory, in the same order, for a rank that gets the values from another.
        random_weights_seed: Makes a random model from config.json alone, the same one on every CPU.
        lora: Is added to the weights, in float32.
    """
    folder = transformer_folder(root, version)
    component = read_family(folder).transformer
    model, weights = _stream(component, folder, random_weights_seed, device if read else "meta")
    return model, weights if lora is None else with_changes(weights, lora)


def load_vae(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> nn.Module:
    """The diffusers VAE, in eval mode, able to take batches; `Family.latents` has the scale of its latents."""
    folder = vae_folder(root)
    family = read_family(folder, "vae")
    vae = _filled(*_stream(family.vae, folder, random_weights_seed, device), dtype, device)
    family.prepare_vae(vae)
    return vae


def load_transformer_weights(transformer: nn.Module, folder: str | Path) -> None:
    """Copies the weights that ``save_pretrained`` wrote to `folder` into `transformer`.

    Its dtype and device stay. Its tensors must be whole: load before it is sharded or given adapters. For a transformer
    without memory nothing is read. Raises ValueError where a tensor or a setting is not the transformer's.
    """
    source = Folder(Path(folder), "transformer weights")
    component = family_of(transformer).transformer
    arguments, is_original = read_arguments(component, source)
    weight_files.refuse(source, setting_problems(transformer.config, arguments, ignored=component.notes))
    targets = transformer.state_dict()
    read = not any(target.is_meta for target in targets.values())
    for name, tensor in _stream_state(component, source, targets, is_original, read=read):
        targets[name].copy_(tensor)


def read_task(root: str | Path, version: str | None) -> str | None:
    """``t2v`` or ``i2v``, what the transformer was trained for as its files say; None where they do not say.

    A diffusers pipeline's model_index.json comes before config.json, which is wrong on the hub: the script that made
    the checkpoints there writes i2v into that of a text-to-video model (diffusers 0.42.1).
    """
    folder = transformer_folder(root, version)
    tasks = {name: task for task, name in read_family(folder).pipelines.items()}
    index = folder.path.parent / "model_index.json"
    if index.is_file() and (task := tasks.get(str(weight_files.read_json(index, "pipeline").get("_class_name")))):
        return task
    if len(tasks) == 1:
        return next(iter(tasks.values()))
    config = weight_files.read_json(folder.path / "config.json", folder.label)
    return config.get("ideal_task", config.get("task_type"))


def read_num_heads(root: str | Path, version: str | None) -> int:
    """Attention heads of the transformer, from its config.json."""
    folder = transformer_folder(root, version)
    return read_arguments(read_family(folder).transformer, folder)[0]["num_attention_heads"]


def find_transformer(root: str | Path, version: str | None = None) -> Path | None:
    """Folder of the transformer's config.json in the original layout, in diffusers', or ``root`` itself."""
    versions = Path(root) / "transformer"
    candidates = [*([versions / version] if version else []), versions]
    # A folder of versions without the one asked for does not stand for it.
    candidates += [] if versions.is_dir() else [Path(root)]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def transformer_folder(root: str | Path, version: str | None) -> Folder:
    """Folder of the transformer. Raises ValueError, naming the versions that are there, where there is none."""
    label = f"transformer version {version!r}"
    if folder := find_transformer(root, version):
        return Folder(folder, label)
    versions = Path(root) / "transformer"
    if versions.is_dir():
        present = sorted(path.parent.name for path in versions.glob("*/config.json"))
        raise ValueError(f"{label}: {versions} has no such folder with a config.json; versions there: {present}")
    raise ValueError(f"{label}: {root} has neither a folder transformer nor a config.json; set pretrained_model_root")


def vae_folder(root: str | Path) -> Folder:
    return Folder(Path(root) / "vae", "VAE")


def read_family(folder: Folder, part: str = "transformer") -> Family:
    """The family of the ``transformer`` or ``vae`` in a folder. Raises ValueError where there is no config.json."""
    return family_of_config(weight_files.read_json(folder.path / "config.json", folder.label), part)


def checked_family(root: str | Path, version: str) -> Family:
    """Return the family of a folder's transformer. Raises ValueError if the version has another family's settings."""
    folder = transformer_folder(root, version)
    family, listed = read_family(folder), version_defaults(version).family
    if family.name != listed:
        raise ValueError(
            f"transformer_version {version} has the settings of {listed}, but {folder.path} has a transformer of "
            f"{family.name}; set transformer_version and pretrained_model_root to one family"
        )
    return family


def build_without_memory(component: Component, folder: Folder) -> tuple[nn.Module, bool]:
    """The model on the meta device, and whether the folder is in the original layout."""
    arguments, is_original = read_arguments(component, folder)
    try:
        with torch.device("meta"):
            return new_model(component, arguments), is_original
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, AssertionError) as error:
        made = f"the settings of {folder.path / 'config.json'} make no {component.class_name}"
        raise ValueError(f"{folder.label}: {made}: {str(error) or type(error).__name__}") from error


def read_arguments(component: Component, folder: Folder) -> tuple[dict[str, Any], bool]:
    """Constructor arguments from the folder's config.json, and whether it is in the original's words."""
    path = folder.path / "config.json"
    config = weight_files.read_json(path, folder.label)
    try:
        if config.get("_class_name") != component.class_name:
            return component.config_to_diffusers(config), True
        return _diffusers_arguments(component, config), False
    except ValueError as error:
        raise ValueError(f"{folder.label}: {path}: {error}") from error


def expected_shapes(component: Component, state: Mapping[str, Tensor], is_original: bool) -> Shapes:
    """Names and shapes that a model's file must have, from the model's state."""
    return weight_files.shapes_of(component.to_original(state) if is_original else state)


def setting_problems(config: Mapping[str, Any], arguments: Mapping[str, Any], ignored: Iterable[str] = ()) -> list[str]:
    """Settings in which the arguments that a config.json gives differ from a model's config."""
    ours, theirs = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        for settings in (_plain(config), arguments)
    )
    return [
        f"{key} is {ours.get(key)!r} in the model and {theirs.get(key)!r} in config.json"
        for key in sorted((set(ours) | set(theirs)) - set(ignored))
        if ours.get(key) != theirs.get(key)
    ]


def _filled(
    model: nn.Module, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype, device: str | torch.device
) -> nn.Module:
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}
    model.load_state_dict(state, strict=True, assign=True)
    tensors = chain(model.named_parameters(), model.named_buffers())
    assert not any(tensor.is_meta for _, tensor in tensors), "a tensor outside the state dict was left without memory"
    return model


def _stream(
    component: Component, folder: Folder, random_seed: int | None, device: str | torch.device
) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """The model without memory, in eval mode, and its weights one after another; on ``meta`` without memory too."""
    model, is_original = build_without_memory(component, folder)
    # Names and shapes as they are now: the caller may change the model before it takes the first weight.
    state = model.eval().state_dict()
    if random_seed is None:
        return model, _stream_state(component, folder, state, is_original, read=torch.device(device).type != "meta")
    drawn = weight_files.draw_tensors(random_seed, expected_shapes(component, state, is_original=True), device)
    return model, (pair for name, tensor in drawn for pair in component.to_diffusers({name: tensor}).items())


def _stream_state(
    component: Component, folder: Folder, state: Mapping[str, Tensor], is_original: bool, *, read: bool
) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors under the model's names, one after another, once all names and shapes are known to fit."""
    expected = expected_shapes(component, state, is_original)
    weights = weight_files.read_header(folder, WEIGHTS_STEM)
    weight_files.refuse(folder, weight_files.tensor_problems(folder, expected, weights))
    for name, tensor in weight_files.stream_tensors(weights, expected, read=read):
        # Both maps work tensor by tensor: one of the original's is one or three of diffusers'.
        yield from (component.to_diffusers({name: tensor}) if is_original else {name: tensor}).items()


def _diffusers_arguments(component: Component, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a diffusers config; absent keys take the class's defaults, as in ``from_config``."""
    import diffusers

    arguments = _plain(config)
    parameters = inspect.signature(getattr(diffusers, component.class_name)).parameters
    if unknown := sorted(set(arguments) - set(parameters)):
        raise ValueError(f"config keys {unknown} are not settings of diffusers' {component.class_name}")
    return {name: parameter.default for name, parameter in parameters.items()} | arguments


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A diffusers config without the keys that only describe it."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
