"""Interface between a model family and the rest of the program: one `Family` of data and functions
per package.

A family is a package in ``hyvideo/models`` or outside the repository (`registry`). Its
``__init__`` lists ``CLASS_NAMES``, the ``_class_name`` values in its models' config.json; its
``family.py`` defines ``FAMILY``. A model's class determines its family. docs/extend.md shows how to write one.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hyvideo.data.prompts import Request
from hyvideo.files.text import quote
from hyvideo.models.attention import WholeSequence
from hyvideo.models.registry import class_problem, module_of, packages
from hyvideo.models.versions import FAMILIES, Task
from hyvideo.weights.names import LoraNames, Rename


class Component(NamedTuple):
    """A class of diffusers or of the family's package, and the conversions between its tensors and
    settings and those of the original.
    """

    class_name: str
    to_diffusers: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    to_original: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    config_to_diffusers: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_original: Callable[[Mapping[str, Any]], dict[str, Any]]
    finish: Callable[[nn.Module], None] = lambda model: None  # called on every new model
    # the class, if diffusers has none of this name: a ModelMixin and ConfigMixin of diffusers
    build: type[nn.Module] | None = None


class License(NamedTuple):
    """License of a family's released weights, which also covers what is trained from them."""

    name: str  # on the Hugging Face Hub: its identifier, or other
    title: str
    link: str = ""
    must_be_copied: bool = False  # asks that its text and a notice accompany trained weights


class Part(NamedTuple):
    """A kind of condition: its input in a request, and the frozen encoder that computes it."""

    kind: str  # field of `Condition`
    # the encoder's input, a text or the paths of images; None if a request has no such condition
    content: Callable[[Request], str | tuple[str, ...] | None]
    folders: tuple[str, ...]  # folders with its files in the checkpoint folder, in either layout
    # (root, *, transformer, vae, dtype, device, random_weights_seed, placement, rotary_dtype)
    # -> encoder: (contents, (frames, height, width) of the videos) -> tensors per content;
    # `transformer` is its config, and `placement` where large encoders keep their weights
    load: Callable[..., Callable[..., list[dict[str, Tensor]]]]
    # (root, weights_needed) -> loading problems, from the file headers
    problems: Callable[[Path, bool], list[str]]
    # the content is the path of an image, or several, which are resized and cropped to the video size
    is_file: bool = False
    feeds: str = ""  # the transformer's module that gets no gradient if no request has this kind


class Latents(NamedTuple):
    """Shape and scale of a VAE's latents; the transformer's inputs are
    ``(latents - mean) * scale``.
    """

    channels: int
    temporal: int  # video frames per latent frame, after the first
    spatial: int  # pixels per latent along a side
    mean: tuple[float, ...]  # one number, or one per channel
    scale: tuple[float, ...]

    def scaled(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents scaled for the transformer.

        Shape: (batch, channels, frames, height, width).
        """
        if any(self.mean):
            latents = latents - _broadcast(self.mean, latents)
        return latents * _broadcast(self.scale, latents)

    def unscaled(self, latents: Tensor) -> Tensor:
        """Return the transformer's latents scaled for the VAE.

        Shape: (batch, channels, frames, height, width).
        """
        latents = latents / _broadcast(self.scale, latents)
        if any(self.mean):
            latents = latents + _broadcast(self.mean, latents)
        return latents


def _broadcast(values: tuple[float, ...], latents: Tensor) -> float | Tensor:
    if len(values) == 1:
        return values[0]
    channels = [
        torch.full((1, 1, 1, 1, 1), value, dtype=latents.dtype, device=latents.device)
        for value in values
    ]
    return torch.cat(channels, dim=1)


@dataclass(frozen=True)
class Family:
    """A family of models: its classes, conversions, encoders and latents."""

    name: str  # name of its package
    transformer: Component
    vae: Component
    blocks: str  # name of the transformer's list of blocks
    # regular expression for the blocks' matrices, which a LoRA and Muon train
    target_modules: str
    # (module, forward pass) pairs: the modules whose forward pass this project replaces. The
    # transformer's is called as transformer(latents, timestep=..., conditions=..., ends=...).
    forwards: Callable[[nn.Module], Iterable[tuple[nn.Module, Callable]]]
    parts: tuple[Part, ...]
    latents: Callable[[Mapping[str, Any]], Latents]  # from the VAE's config
    # frames, height, width of a token, from the config
    patch: Callable[[Mapping[str, Any]], tuple[int, int, int]]
    prepare_vae: Callable[[nn.Module], None]  # replaces layers of the VAE
    # (vae, tile size in pixels, overlap of adjacent tiles)
    set_tiling: Callable[[nn.Module, int, float], None]
    pipelines: Mapping[str, str]  # task (t2v, i2v) -> diffusers' pipeline class
    # task of a transformer, from its config and the pipeline's model_index.json, which is empty if
    # there is no such file; None if the pipeline's class decides
    task: Callable[[Mapping[str, Any], Mapping[str, Any]], Task | None] = lambda *_: None
    # fewest and most given frames of a video, of a transformer with this config: 1 is the first, 2 the
    # first and the last; None: 0 or 1, as the task says
    given_frames: Callable[[Mapping[str, Any]], tuple[int, int] | None] = lambda config: None
    # modules that get no gradient
    without_gradient: Callable[[nn.Module], tuple[str, ...]] = lambda transformer: ()
    # whether the VAE's decoder returns a tensor and a cache for its next call, as in Mochi
    decoder_returns_cache: bool = False
    # whether the forward pass uses `ends`
    is_flow_map: Callable[[Mapping[str, Any]], bool] = lambda config: False
    # (transformer) -> cache of the outputs of its frozen modulation layers, or None; see
    # `ModulationCache`
    cache_modulation: Callable[[nn.Module], Any] = lambda transformer: None
    # fp16 encoders of the original have rotary frequencies in fp16, too
    rounds_rotary: bool = False
    # (root) -> problems: a layout that is not read
    unread_files: Callable[[Path], list[str]] = lambda root: []
    license: License | None = None
    # names of parameters in LoRA files of all programs; None: only diffusers' names are read
    lora_names: LoraNames | None = None
    # prefix in LoRA files with the original's names
    lora_prefix: str = ""
    # for ComfyUI, from diffusers' names: (rows of a LoRA by name) -> rows by name, and (state dict)
    # -> state dict; None if the family's models do not exist there
    lora_to_comfyui: Rename | None = None
    model_to_comfyui: Rename | None = None
    # transformers of other diffusers classes, with the same blocks, names and forward pass
    variants: tuple[Component, ...] = ()

    def transformer_of(self, class_name: str) -> Component:
        """Return the transformer with the ``_class_name`` of a config.json: a variant, or
        ``transformer``, which also reads the original's classes.
        """
        for variant in self.variants:
            if variant.class_name == class_name:
                return variant
        return self.transformer

    def kinds(self, requests: Iterable[Request]) -> frozenset[str]:
        """Return the kinds of conditions that occur in the requests."""
        requests = list(requests)
        return frozenset(
            part.kind for part in self.parts if any(part.content(r) is not None for r in requests)
        )

    def install(self, transformer: nn.Module, sequence: WholeSequence | None = None) -> None:
        """Replace a transformer's forward pass by this project's; a second call only replaces
        ``sequence``.
        """
        # later, activation checkpointing may wrap a block's forward
        is_first = not hasattr(transformer, "sequence")
        transformer.is_flow_map = self.is_flow_map(transformer.config)
        transformer.detaches_blocks = False  # see `gradient_mode`
        transformer.modulation_cache = None  # a cache of `cache_modulation` under a LoRA on a GPU
        sequence = sequence or WholeSequence()
        for module, forward in self.forwards(transformer):
            module.sequence = sequence
            if is_first:
                module.forward = types.MethodType(forward, module)

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders in the checkpoint folder whose files determine the conditions."""
        return ("vae", *(folder for part in self.parts for folder in part.folders))


def family_of(model: nn.Module | str) -> Family:
    """Return the family of a model or of a class name, diffusers' or the original's.

    Raises ValueError if unknown.
    """
    # FSDP2 subclasses it
    names = [model] if isinstance(model, str) else [cls.__name__ for cls in type(model).__mro__]
    for name in names:
        if name in packages():
            return family_named(packages()[name])
    raise ValueError(
        f"a model must be of one of the classes {', '.join(sorted(packages()))}, got {names[0]}"
    )


def new_model(component: Component, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a model of a component's class, with the initialization of this class."""
    model = model_class(component)(**arguments)
    component.finish(model)
    return model


def model_class(component: Component) -> type[nn.Module]:
    """Return the class of a component, which is diffusers' unless the family brings its own.

    Raises ValueError if diffusers does not have it.
    """
    import diffusers

    if component.build is not None:
        return component.build
    if not hasattr(diffusers, component.class_name):
        raise ValueError(
            f"diffusers {diffusers.__version__} has no class {component.class_name}; pass your own "
            "class to the component in family.py, Component(..., build=CLASS), or install a version "
            "of diffusers that has it"
        )
    return getattr(diffusers, component.class_name)


def component_of(model: nn.Module) -> Component:
    """Return the component that describes a transformer or a VAE."""
    family = family_of(model)
    names = [cls.__name__ for cls in type(model).__mro__]
    for transformer in (family.transformer, *family.variants):
        if transformer.class_name in names:
            return transformer
    return family.vae


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the family of the model that a config.json describes; the first family if it names no
    class.

    Raises ValueError for a class of no known family.
    """
    if "_class_name" not in config:
        return families()[0]
    name = str(config["_class_name"])
    if name not in packages():
        raise ValueError(class_problem(name))
    return family_of(name)


def transformer_of_config(config: Mapping[str, Any], family: Family | None = None) -> Component:
    """Return the component of the transformer that a config.json describes, of ``family`` if given.

    Raises ValueError for a class of no known family.
    """
    family = family or family_of_config(config)
    return family.transformer_of(str(config.get("_class_name", "")))


def family_named(name: str) -> Family:
    """Return the family of a package. Raises ValueError if it has another name than the package."""
    family = module_of(name, "family").FAMILY
    if family.name != name:
        raise ValueError(
            f"the name of a FAMILY must be that of its folder, {quote(name)}, got "
            f"{quote(family.name)}; change it in family.py"
        )
    return family


def families() -> list[Family]:
    """Return all families, the built-in ones first: old files that name no class belong to the
    first.
    """
    return [family_named(name) for name in FAMILIES]


def blocks(transformer: nn.Module) -> nn.ModuleList:
    """Return the blocks of a transformer, the units of FSDP, activation checkpointing and
    compilation.
    """
    return transformer.get_submodule(family_of(transformer).blocks)


def install(transformer: nn.Module, sequence: WholeSequence | None = None) -> None:
    """Replace a diffusers transformer's forward pass by this project's (`Family.install`)."""
    family_of(transformer).install(transformer, sequence)


def prepare(transformer: nn.Module, kinds: Iterable[str]) -> None:
    """Install this project's forward pass and freeze the modules that these kinds of conditions do
    not use.
    """
    install(transformer)
    freeze_unused_parameters(transformer)
    for part in family_of(transformer).parts:
        if part.feeds and part.kind not in kinds:
            transformer.get_submodule(part.feeds).requires_grad_(False)


def freeze_unused_parameters(transformer: nn.Module) -> None:
    """Freeze parameters that never get a gradient, so that optimizers and reductions skip them."""
    for name in family_of(transformer).without_gradient(transformer):
        transformer.get_submodule(name).requires_grad_(False)
