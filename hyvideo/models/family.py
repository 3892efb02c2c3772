"""What the rest of the program knows of a family of models: one `Family` of data and functions for each package.

A family is a package below ``hyvideo/models``. Its ``__init__`` lists ``CLASS_NAMES``, by which a config.json names its
models; its ``family.py`` has ``FAMILY``; its ``sizes.py`` has the arithmetic of the planner. A model knows its family
by its class. docs/add_a_model.md shows how to write one.
"""

import importlib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hyvideo.data.prompts import Request
from hyvideo.models.attention import WholeSequence
from hyvideo.models.sizes import packages


class Component(NamedTuple):
    """A diffusers class, and the ways between it and the original's files."""

    class_name: str
    to_diffusers: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    to_original: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    config_to_diffusers: Callable[[Mapping[str, Any]], dict[str, Any]]
    config_to_original: Callable[[Mapping[str, Any]], dict[str, Any]]
    notes: frozenset[str] = frozenset()  # settings that the forward pass does not read
    finish: Callable[[nn.Module], None] = lambda model: None  # called with every new model


class Part(NamedTuple):
    """A kind of condition: what of a request it is made of, and the frozen encoder that makes it."""

    kind: str  # field of `Condition`
    content: Callable[[Request], str | None]  # None where a request has nothing of this kind
    folders: tuple[str, ...]  # of its files below the checkpoint folder, in either layout
    # (root, *, vae, dtype, device, random_weights_seed) to an encoder: (contents, height, width) to tensors of each
    load: Callable[..., Callable[..., list[dict[str, Tensor]]]]
    problems: Callable[[Path, bool], list[str]]  # (root, weights_needed): what keeps it from loading, by headers
    is_file: bool = False  # the content is the path of a file, which is fitted to the size of the video
    feeds: str = ""  # module of the transformer that gets no gradient where no request has this kind


class Latents(NamedTuple):
    """Shape and scale of a VAE's latents: the transformer sees ``(latents - mean) * divisor``."""

    channels: int
    temporal: int  # frames of video for each frame of latents, after the first
    spatial: int  # pixels for each latent, along a side
    mean: tuple[float, ...]  # one number, or one for each channel
    divisor: tuple[float, ...]

    def scaled(self, latents: Tensor) -> Tensor:
        """Return the VAE's latents as the transformer sees them. Shape: (batch, channels, frames, height, width)."""
        shifted = latents - _broadcast(self.mean, latents) if any(self.mean) else latents
        return shifted * _broadcast(self.divisor, latents)

    def unscaled(self, latents: Tensor) -> Tensor:
        """Return the transformer's latents as the VAE decodes them. Shape: (batch, channels, frames, height, width)."""
        divided = latents / _broadcast(self.divisor, latents)
        return divided + _broadcast(self.mean, latents) if any(self.mean) else divided


def _broadcast(values: tuple[float, ...], latents: Tensor) -> float | Tensor:
    if len(values) == 1:
        return values[0]
    channels = [torch.full((1, 1, 1, 1, 1), value, dtype=latents.dtype, device=latents.device) for value in values]
    return torch.cat(channels, dim=1)


@dataclass(frozen=True)
class Family:
    """A family of models. ``docs/add_a_model.md`` shows how to write one."""

    name: str  # of its package
    transformer: Component
    vae: Component
    blocks: str  # name of the transformer's list of blocks
    matrices: str  # regular expression of the blocks' matrices: targets of a LoRA, and Muon's scope
    original_modules: str  # regular expression of the beginnings of module names that only the original has
    # Modules of a transformer with a forward pass of ours, and that; the transformer's own is called as
    # transformer(latents, timestep=..., conditions=..., ends=...).
    forwards: Callable[[nn.Module], Iterable[tuple[nn.Module, Callable]]]
    stock_inputs: Callable[..., dict[str, Any]]  # (transformer, latents, timestep, conditions) for diffusers' forward
    parts: tuple[Part, ...]
    latents: Callable[[Mapping[str, Any]], Latents]  # from the VAE's config
    patch: Callable[[Mapping[str, Any]], tuple[int, int, int]]  # frames, height, width of a token, by the config
    prepare_vae: Callable[[nn.Module], None]  # gives it our layers
    set_tiling: Callable[[nn.Module, int, float], None]  # (vae, pixels on a side of a tile, part that neighbours share)
    pipelines: Mapping[str, str]  # diffusers' pipelines by the task of their transformer
    export_parts: Callable[..., dict[str, Any]]  # the other parts of a diffusers pipeline
    without_gradient: Callable[[nn.Module], tuple[str, ...]] = lambda transformer: ()  # modules that reach no output
    reads_ends: Callable[[Mapping[str, Any]], bool] = lambda config: False  # whether a forward pass reads `ends`
    lora_prefix: str = ""  # of modules in LoRA files for the original's programs, which then have alpha as a tensor

    def kinds(self, requests: Iterable[Request]) -> frozenset[str]:
        """Return the kinds of conditions that any of the requests has."""
        requests = list(requests)
        return frozenset(part.kind for part in self.parts if any(part.content(one) is not None for one in requests))

    def install(self, transformer: nn.Module, sequence: WholeSequence | None = None) -> None:
        """Give a transformer our forward pass, over a sequence that may be split; twice is once."""
        is_first = not hasattr(transformer, "sequence")  # later, a block may have a recomputation around its forward
        transformer.reads_ends = self.reads_ends(transformer.config)
        sequence = sequence or WholeSequence()
        for module, forward in self.forwards(transformer):
            module.sequence = sequence
            if is_first:
                module.forward = types.MethodType(forward, module)

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders below the checkpoint folder whose files decide the conditions."""
        return ("vae", *(folder for part in self.parts for folder in part.folders))


def family_of(model: nn.Module | str) -> Family:
    """Return the family of a model, or of a class name of diffusers or the original; ValueError for another."""
    names = [model] if isinstance(model, str) else [cls.__name__ for cls in type(model).__mro__]  # FSDP2 subclasses it
    for name in names:
        if name in packages():
            return family_named(packages()[name])
    raise ValueError(f"a model must be of one of the classes {', '.join(sorted(packages()))}, got {names[0]}")


def new_model(component: Component, arguments: Mapping[str, Any]) -> nn.Module:
    """Return a model of diffusers' class, initialised by it."""
    import diffusers

    model = getattr(diffusers, component.class_name)(**arguments)
    component.finish(model)
    return model


def component_of(model: nn.Module) -> Component:
    """Return the component that a transformer or a VAE is."""
    family, names = family_of(model), [cls.__name__ for cls in type(model).__mro__]
    return family.transformer if family.transformer.class_name in names else family.vae


def family_of_config(config: Mapping[str, Any], part: str) -> Family:
    """Return the family of a config.json of the ``transformer`` or the ``vae``.

    Where its ``_class_name`` is missing or unknown its settings decide; what none understands is left to the first
    family, whose reader says what is wrong.
    """
    if (name := str(config.get("_class_name"))) in packages():
        return family_of(name)
    for family in families():
        with suppress(ValueError):
            getattr(family, part).config_to_diffusers(config)
            return family
    return families()[0]


def family_named(package: str) -> Family:
    """Return the family of a package below ``hyvideo/models``."""
    return importlib.import_module(f"hyvideo.models.{package}.family").FAMILY


def families() -> list[Family]:
    """Return all families."""
    return [family_named(package) for package in dict.fromkeys(packages().values())]


def blocks(transformer: nn.Module) -> nn.ModuleList:
    """Return the blocks of a transformer: what FSDP, recomputation and compilation wrap."""
    return transformer.get_submodule(family_of(transformer).blocks)


def install(transformer: nn.Module, sequence: WholeSequence | None = None) -> None:
    """Give a diffusers transformer our forward pass: `Family.install`."""
    family_of(transformer).install(transformer, sequence)


def prepare(transformer: nn.Module, kinds: Iterable[str]) -> None:
    """Install our forward pass, and freeze what no gradient can reach with conditions of these kinds."""
    install(transformer)
    freeze_dead_parameters(transformer)
    for part in family_of(transformer).parts:
        if part.feeds and part.kind not in kinds:
            transformer.get_submodule(part.feeds).requires_grad_(False)


def freeze_dead_parameters(transformer: nn.Module) -> None:
    """Freeze what never gets a gradient, so that no optimizer or reduction waits for one."""
    for name in family_of(transformer).without_gradient(transformer):
        transformer.get_submodule(name).requires_grad_(False)


def stock_twin(transformer: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return diffusers' model with its own forward pass, on shared weights unless ``dtype`` is another one."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        twin = getattr(diffusers, family_of(transformer).transformer.class_name).from_config(transformer.config)
    state = {name: tensor.to(dtype) for name, tensor in transformer.state_dict().items()}
    twin.load_state_dict(state, strict=True, assign=True)
    return twin.eval()
