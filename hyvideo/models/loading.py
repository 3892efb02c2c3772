"""Loading of the transformer and VAE from a checkpoint folder in the original layout or in
diffusers' layout.

    original    root/transformer/<version>/{config.json, diffusion_pytorch_model.safetensors}
                root/vae/{config.json, diffusion_pytorch_model.safetensors}
    diffusers   root/{transformer, vae}/, weights possibly in several files; or root as a single transformer
    two experts root/{transformer, transformer_2}/ or root/{high_noise_model, low_noise_model}/

The model is built on the meta device. Tensors are read, one by one, only if all names and shapes
match the headers of the files. A compact checkpoint omits random tensors that are never trained:
the metadata of its file has a key ``drawn``, a JSON object {prefix: seed}, from which
`weight_files.draw_tensor` generates them again.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyvideo.files.files import read_json
from hyvideo.files.text import describe_error
from hyvideo.models.config_file import read_config
from hyvideo.models.decoding import use_channels_last
from hyvideo.models.family import (
    Component,
    Family,
    component_of,
    family_of_config,
    model_class,
    new_model,
    transformer_of_config,
)
from hyvideo.models.fp8 import Fp8Linear
from hyvideo.models.guidance import Expert
from hyvideo.models.lora import Lora, with_lora
from hyvideo.models.versions import experts_of
from hyvideo.weights import weight_files
from hyvideo.weights.pipeline_folder import read_index
from hyvideo.weights.weight_files import Folder, Shapes

WEIGHTS_STEM = "diffusion_pytorch_model"
# Folders of the transformer, in diffusers' layout and in that of the authors of models of two experts.
TRANSFORMERS: dict[Expert | None, tuple[str, ...]] = {
    None: ("transformer",),
    "high": ("transformer", "high_noise_model"),
    "low": ("transformer_2", "low_noise_model"),
}


def load_transformer(
    root: str | Path,
    version: str | None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **kwargs: Any,
) -> nn.Module:
    """Load the diffusers transformer in eval mode, with trainable parameters; ``kwargs`` as in
    `stream_transformer`.

    Raises ValueError, naming tensor, file and version, if a file or a tensor is missing, corrupted
    or does not fit.
    """
    return _load_weights(*stream_transformer(root, version, device=device, **kwargs), dtype, device)


def transformer_on_meta(
    root: str | Path, version: str | None, expert: Expert | None = None
) -> nn.Module:
    """Return the transformer on the meta device, without weights."""
    folder = transformer_folder(root, version, expert)
    return build_on_meta(read_transformer(folder), folder)[0]


def transformer_from_config(path: Path) -> nn.Module:
    """Return the transformer described by a JSON file of diffusers' settings, on the meta
    device.
    """
    config = read_json(path, "transformer")
    component = transformer_of_config(config)
    with torch.device("meta"):
        return new_model(component, _diffusers_arguments(component, config))


def stream_transformer(
    root: str | Path,
    version: str | None,
    *,
    expert: Expert | None = None,
    read: bool = True,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
    loras: Iterable[Lora] = (),
) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """Return the transformer on the meta device and an iterator over its named weights, for filling
    shards.

    Weights from files are on the CPU; LoRAs are added, and random weights of a large model generated,
    on ``device``.
    The iterator raises ValueError as `load_transformer` does: before the first weight, or after the
    last one if the values in a file are damaged.

    Args:
        version: Name of the transformer in the original layout (``480p_t2v``); other layouts have a
            single transformer.
        expert: Which transformer of a model of two; None for a model of one.
        read: False yields meta tensors in the same order, for ranks that get the values from
            another rank.
        random_weights_seed: Generate random weights, identical on every CPU; only config.json is
            read.
        loras: LoRAs to add to the weights, in float32.
    """
    folder = transformer_folder(root, version, expert)
    component = read_transformer(folder)
    place = device if read else "meta"
    model, weights = _stream(component, folder, random_weights_seed, place)
    for lora in loras:
        weights = with_lora(weights, lora, place)
    return model, weights


def load_vae(
    root: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    random_weights_seed: int | None = None,
) -> nn.Module:
    """Load the diffusers VAE in eval mode, with support for batches.

    `Family.latents` has the scale of its latents.
    """
    folder = vae_folder(root)
    family = read_family(folder)
    empty, weights = _stream(family.vae, folder, random_weights_seed, device)
    model = _load_weights(empty, weights, dtype, device)
    family.prepare_vae(model)
    if torch.device(device).type == "cuda":
        use_channels_last(model)
    return model


def load_transformer_weights(transformer: nn.Module, folder: str | Path) -> None:
    """Copy the weights that ``save_pretrained`` wrote to `folder` into `transformer`, keeping its
    dtype and device, and matrices in fp8.

    Call it before sharding the transformer or adding adapters. If it is on the meta device, only
    headers are read. Raises ValueError if the shape of a tensor differs from the transformer's.
    """
    source = Folder(Path(folder), "transformer weights")
    component = component_of(transformer)
    _, is_original = read_arguments(component, source)
    targets = transformer.state_dict()
    in_fp8 = {
        f"{name}.weight": module
        for name, module in transformer.named_modules()
        if isinstance(module, Fp8Linear)
    }
    read = not any(target.is_meta for target in targets.values())
    for name, tensor in _stream_state(component, source, targets, is_original, read=read):
        if name in in_fp8 and read:
            in_fp8[name].store(tensor.to(targets[name].device, targets[name].dtype))
        else:
            targets[name].copy_(tensor)


def read_task(root: str | Path, version: str | None) -> str | None:
    """Return the task of the transformer according to its files, ``t2v``, ``i2v`` or ``ti2v``; None
    if they do not state it.

    The model_index.json of a diffusers pipeline takes precedence over config.json, which is wrong
    on the hub: the conversion script writes i2v into the config.json of text-to-video models
    (diffusers 0.42.1).
    """
    folder = transformer_folder(root, version)
    family = read_family(folder)
    index = read_index(folder.path.parent)
    arguments, _ = read_arguments(read_transformer(folder, family), folder)
    if task := family.task(arguments, index):
        return task
    tasks = {name: task for task, name in family.pipelines.items()}
    task = tasks.get(str(index.get("_class_name")))
    if task:
        return task
    if len(tasks) == 1:
        return next(iter(tasks.values()))
    config = read_json(folder.path / "config.json", folder.label)
    return config.get("ideal_task", config.get("task_type"))


def find_transformer(
    root: str | Path, version: str | None = None, expert: Expert | None = None
) -> Path | None:
    """Return the folder of the transformer's config.json in the original or diffusers' layout, or
    ``root`` itself. Without an ``expert``, it is the first one of a version of two.
    """
    expert = expert or experts_of(version)[0]
    versions = [Path(root) / name for name in TRANSFORMERS[expert]]
    candidates = [folder / version for folder in versions] if version else []
    candidates += versions
    # If there is a folder of versions, do not replace a missing version by ``root`` itself.
    if expert is None and not versions[0].is_dir():
        candidates.append(Path(root))
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def transformer_folder(
    root: str | Path, version: str | None, expert: Expert | None = None
) -> Folder:
    """Return the folder of the transformer.

    Raises ValueError, listing the available versions, if it is missing.
    """
    label = f"transformer version {version!r}"
    folder = find_transformer(root, version, expert)
    if folder:
        return Folder(folder, label)
    expert = expert or experts_of(version)[0]
    if expert:
        names = " and no ".join(TRANSFORMERS[expert])
        raise ValueError(
            f"{label}: {root} has no {names} with a config.json, the {expert}-noise expert; "
            "download it, or set pretrained_model_root"
        )
    versions = Path(root) / "transformer"
    if versions.is_dir():
        present = sorted(path.parent.name for path in versions.glob("*/config.json"))
        raise ValueError(
            f"{label}: {versions} has no such folder with a config.json; available: {present}"
        )
    raise ValueError(
        f"{label}: {root} has neither a transformer folder nor a config.json; there is "
        f"{weight_files.contents_of(Path(root))}. Set pretrained_model_root to a folder in "
        "diffusers' layout, or to the name of its repository on the Hugging Face Hub"
    )


def vae_folder(root: str | Path) -> Folder:
    return Folder(Path(root) / "vae", "VAE")


def read_family(folder: Folder) -> Family:
    """Return the family of the transformer or VAE in a folder.

    Raises ValueError without a config.json.
    """
    return family_of_config(read_json(folder.path / "config.json", folder.label))


def read_transformer(folder: Folder, family: Family | None = None) -> Component:
    """Return the component of the transformer in a folder, of ``family`` if given.

    Raises ValueError without a config.json.
    """
    return transformer_of_config(read_json(folder.path / "config.json", folder.label), family)


def build_on_meta(component: Component, folder: Folder) -> tuple[nn.Module, bool]:
    """Return the model on the meta device, and whether the folder is in the original layout."""
    arguments, is_original = read_arguments(component, folder)
    try:
        with torch.device("meta"):
            return new_model(component, arguments), is_original
    except Exception as error:  # whatever diffusers' classes raise
        raise ValueError(
            f"{folder.label}: cannot build a {component.class_name} from "
            f"{folder.path / 'config.json'}: {describe_error(error)}"
        ) from error


def read_arguments(component: Component, folder: Folder) -> tuple[dict[str, Any], bool]:
    """Return the constructor arguments from a folder's config.json, and whether it uses the
    original's names.
    """
    path = folder.path / "config.json"
    config = read_config(folder.path, folder.label)
    try:
        if config.get("_class_name") != component.class_name:
            return component.config_to_diffusers(config), True
        return _diffusers_arguments(component, config), False
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{folder.label}: {path}: {describe_error(error)}") from error


def expected_shapes(component: Component, state: Mapping[str, Tensor], is_original: bool) -> Shapes:
    """Return the tensor names and shapes that a model's files must have, from its state dict."""
    if is_original:
        state = component.to_original(state)
    return weight_files.shapes_of(state)


def _load_weights(
    model: nn.Module,
    weights: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: str | torch.device,
) -> nn.Module:
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}
    model.load_state_dict(state, strict=True, assign=True)
    tensors = chain(model.named_parameters(), model.named_buffers())
    assert not any(tensor.is_meta for _, tensor in tensors), (
        "a tensor outside the state dict is on the meta device"
    )
    return model


def _stream(
    component: Component, folder: Folder, random_seed: int | None, device: str | torch.device
) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """Return the model on the meta device, in eval mode, and an iterator over its weights."""
    model, is_original = build_on_meta(component, folder)
    # Taken now because the caller may change the model before it reads the first weight.
    state = model.eval().state_dict()
    if random_seed is None:
        return model, _stream_state(
            component, folder, state, is_original, read=torch.device(device).type != "meta"
        )
    drawn = weight_files.draw_tensors(
        random_seed, expected_shapes(component, state, is_original=True), device
    )
    return model, (
        pair for name, tensor in drawn for pair in component.to_diffusers({name: tensor}).items()
    )


def _stream_state(
    component: Component,
    folder: Folder,
    state: Mapping[str, Tensor],
    is_original: bool,
    *,
    read: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Check all names and shapes, then yield the folder's tensors one by one under the model's
    names.
    """
    expected = expected_shapes(component, state, is_original)
    weights = weight_files.read_header(folder, WEIGHTS_STEM)
    weight_files.raise_problems(folder, weight_files.tensor_problems(folder, expected, weights))
    for name, tensor in weight_files.stream_tensors(
        weights, expected, label=folder.label, read=read
    ):
        converted = {name: tensor}
        if is_original:
            # The conversion works tensor by tensor: each original tensor becomes one or three of
            # diffusers'.
            converted = component.to_diffusers(converted)
        yield from converted.items()


def _diffusers_arguments(component: Component, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a diffusers config; absent keys take the class's defaults, as in
    ``from_config``.
    """
    arguments = _plain(config)
    parameters = inspect.signature(model_class(component)).parameters
    unknown = sorted(set(arguments) - set(parameters))
    if unknown:
        raise ValueError(
            f"config keys {unknown} are not arguments of the class {component.class_name}"
        )
    return {name: parameter.default for name, parameter in parameters.items()} | arguments


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a diffusers config without its metadata keys, which begin with an underscore."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
