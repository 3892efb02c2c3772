"""LoRAs: their types, and adapters (peft) of the diffusers transformer.

A LoRA adds ``alpha / rank * B A`` to a weight. Some also have differences of whole parameters, such as
norms and biases, which are added to the base weights before an adapter is made.

`lora_files` reads the files of all programs, `lora_saving` writes them.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hyvideo.models.family import Component, family_of
from hyvideo.models.fp8 import Fp8Linear
from hyvideo.weights.weight_files import truncate

if TYPE_CHECKING:
    from peft import LoraConfig

warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated")  # cannot merge


@dataclass(frozen=True)
class LoraPair:
    """LoRA matrices of a module, and alpha."""

    a: Tensor  # (rank, in features)
    b: Tensor  # (out features, rank)
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Difference:
    """Change of a whole parameter, such as a norm's weight or a bias."""

    tensor: Tensor  # with the shape of the parameter


# names in the diffusers transformer: of a module -> matrices, of a parameter -> difference
Lora = dict[str, LoraPair | Difference]


def pairs_of(lora: Lora) -> dict[str, LoraPair]:
    """Return the matrices by module."""
    return {name: value for name, value in lora.items() if isinstance(value, LoraPair)}


def differences_of(lora: Lora) -> dict[str, Difference]:
    """Return the differences by parameter."""
    return {name: value for name, value in lora.items() if isinstance(value, Difference)}


def add_lora(transformer: nn.Module, lora: Lora, *, scale: float = 1.0) -> None:
    """Add a LoRA to a transformer for sampling, scaled by ``scale``, and freeze all weights.

    Differences are added to the weights, in float32 and rounded to their dtype. Raises ValueError,
    before anything is changed, if a module, a parameter or a shape does not match the transformer.
    """
    from peft import set_peft_model_state_dict

    fit_lora(transformer, lora)
    parameters = dict(transformer.named_parameters())
    modules = dict(transformer.named_modules())
    with torch.no_grad():
        for name, difference in differences_of(lora).items():
            parameter = parameters[name]
            change = scale * difference.tensor.float().to(parameter.device)
            module_name, _, kind = name.rpartition(".")
            if kind == "weight" and isinstance(modules[module_name], Fp8Linear):
                changed = parameter.dequantize().float() + change
                modules[module_name].store(changed.to(parameter.dtype))
            else:
                parameter.copy_(parameter.float() + change)
    pairs = pairs_of(lora)
    if pairs:
        _add_adapter(transformer, config_of(pairs))
        loaded = set_peft_model_state_dict(transformer, state_of(pairs))
        assert not loaded.unexpected_keys and not any("lora_" in key for key in loaded.missing_keys)
        for layer in _adapted_layers(transformer):
            layer.set_scale("default", scale)
    transformer.requires_grad_(False)


def fit_lora(transformer: nn.Module, lora: Lora) -> None:
    """Remove from a LoRA, with a warning, what it changes in modules that only other transformers of
    the family have.

    Raises ValueError if other modules, parameters or shapes do not match the transformer, which may
    be on the meta device.
    """
    _remove_absent(transformer, lora)
    modules = dict(transformer.named_modules())
    parameters = dict(transformer.named_parameters())
    problems = []
    for name, difference in differences_of(lora).items():
        needed = tuple(difference.tensor.shape)
        if name not in parameters:
            problems.append(f"{name} is not a parameter of the transformer")
        elif tuple(parameters[name].shape) != needed:
            problems.append(
                f"{name} has shape {tuple(parameters[name].shape)}, but the LoRA changes {needed}"
            )
    for name, pair in pairs_of(lora).items():
        module = modules.get(name)
        needed = (len(pair.b), pair.a.shape[1])
        if not isinstance(module, nn.Linear):
            problems.append(f"{name} is not a linear layer of the transformer")
        elif tuple(module.weight.shape) != needed:
            problems.append(
                f"{name} has shape {tuple(module.weight.shape)}, but the LoRA is for {needed}"
            )
    if problems:
        rule = f"the LoRA does not fit the transformer, of family {family_of(transformer).name}:"
        raise ValueError("\n  ".join([rule, *truncate(problems)]))


def _remove_absent(transformer: nn.Module, lora: Lora) -> None:
    names = family_of(transformer).lora_names
    if names is None:
        return
    modules = dict(transformer.named_modules())
    absent = []
    for name, change in list(lora.items()):
        module = name if isinstance(change, LoraPair) else name.rpartition(".")[0]
        if names.is_optional(module) and modules.get(module) is None:
            absent.append(module)
            del lora[name]
    if absent:
        left_out = sorted(set(absent))
        warnings.warn(
            f"{len(left_out)} modules of the LoRA that the model does not have are left out: "
            f"{', '.join(truncate(left_out))}",
            stacklevel=4,
        )


def current_lora(
    transformer: nn.Module, *, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Lora:
    """Return a copy of the transformer's adapter as a LoRA on the CPU; ``gather`` turns a sharded
    tensor into a full one.
    """
    pairs = {}
    for name, module in transformer.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            a, b = (
                gather(side["default"].weight.detach()).to("cpu", copy=True)
                for side in (module.lora_A, module.lora_B)
            )
            pairs[name] = LoraPair(a, b, float(module.lora_alpha["default"]))
    return pairs


def training_config(
    transformer: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = (),
    start: Lora | None = None,
) -> "LoraConfig":
    """Return peft's config of the adapter to train: the config of the LoRA ``start`` or, if None, of a
    new adapter.

    A new adapter covers all trainable matrices of the blocks, or the modules that ``targets``
    selects. Raises ValueError for targets without a match, and if ``start`` has another rank or
    another alpha.
    """
    from peft import LoraConfig

    if start is None:
        names = target_modules(transformer, targets or [family_of(transformer).target_modules])
        # A regular expression, because peft would match a list with longer names, too.
        return LoraConfig(r=rank, lora_alpha=alpha, target_modules="|".join(map(re.escape, names)))
    fit_lora(transformer, start)
    pairs = pairs_of(start)
    found = {(pair.rank, pair.alpha) for pair in pairs.values()}
    if not pairs:
        raise ValueError(
            "the LoRA in pretrained_lora_path has only differences of whole parameters and nothing to "
            "train further; set lora_rank 0 to merge it, or base_lora_path to train a new LoRA on it"
        )
    if found != {(rank, alpha)}:
        needed = ", ".join(f"{rank} and {alpha:g}" for rank, alpha in sorted(found))
        raise ValueError(
            "lora_rank and lora_alpha must equal those of the LoRA in pretrained_lora_path, which "
            f"is trained further: got {rank} and {alpha:g}, need {needed}. Set these, or lora_rank "
            "0 to merge it and train all weights"
        )
    return config_of(pairs)


def target_modules(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the trainable linear layers that match one of ``targets``.

    A target is a regular expression for names, or for their ends after a dot, in the transformer or
    the original: ``img_attn_q`` selects ``attn.to_q`` in all blocks. Raises ValueError without a
    match.
    """
    family = family_of(transformer)
    unused = family.without_gradient(transformer)
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(
            "a LoRA trains linear layers, and this transformer has none, as a model of convolutions; "
            "set lora_rank 0 to train all weights"
        )
    names = [(name, name) for name in linear] + _with_original_names(linear, family.transformer)
    chosen: set[str] = set()
    for target in targets:
        pattern = re.compile(rf"(?:.*\.)?(?:{target})")
        found = {
            module
            for name, module in names
            if pattern.fullmatch(name) and not module.startswith(unused)
        }
        if not found:
            raise ValueError(
                "lora_target_modules: no trainable linear layer of the transformer matches "
                f"{target!r}"
            )
        chosen |= found
    return [name for name in linear if name in chosen]


def _with_original_names(linear: Sequence[str], component: Component) -> list[tuple[str, str]]:
    """Return (original name, diffusers name) pairs of linear layers; a fused layer of the original
    has three pairs.
    """
    rows = component.to_original(
        {f"{name}.weight": torch.empty(6, 1, device="meta") for name in linear}
    )
    return [
        (name.removesuffix(".weight"), source.removesuffix(".weight"))
        for name, b in rows.items()
        for source in component.to_diffusers({name: b})
    ]


def add_trainable_lora(transformer: nn.Module, config: "LoraConfig") -> None:
    """Add a trainable float32 adapter, whose values the caller sets; freeze all else, and adapters
    of frozen layers.
    """
    frozen = {
        name.removesuffix(".weight")
        for name, value in transformer.named_parameters()
        if not value.requires_grad
    }
    _add_adapter(transformer, config)
    for name, parameter in transformer.named_parameters():
        module, _, side = name.partition(".lora_")
        parameter.requires_grad_(bool(side) and module not in frozen)
        if side:
            parameter.data = parameter.data.float()


def _add_adapter(transformer: nn.Module, config: "LoraConfig") -> None:
    """Add an adapter named default by peft itself, which needs no class of diffusers."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, transformer, "default")
    transformer._hf_peft_config_loaded = True  # for methods of diffusers such as disable_adapters
    for layer in _adapted_layers(transformer):
        # leave casting to autocast: peft would cast all tokens to float32
        layer.cast_input_dtype_enabled = False


def _adapted_layers(transformer: nn.Module) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]


def with_lora(
    weights: Iterable[tuple[str, Tensor]], lora: Lora, device: str | torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) pairs with the LoRA and its differences added in float32, on ``device`` or
    where the weight is; meta tensors are yielded unchanged.
    """
    pairs = pairs_of(lora)
    differences = differences_of(lora)
    for name, weight in weights:
        pair = pairs.get(name.removesuffix(".weight"))
        difference = differences.get(name)
        if not weight.is_meta and (pair or difference):
            weight = weight.to(device or weight.device, torch.float32)
            if pair:
                b, a = (side.to(weight.device, torch.float32) for side in (pair.b, pair.a))
                weight = weight + pair.alpha / pair.rank * b @ a
            if difference:
                weight = weight + difference.tensor.to(weight.device, torch.float32)
        yield name, weight


def config_of(lora: Mapping[str, LoraPair]) -> "LoraConfig":
    """Return peft's config of an adapter with these matrices."""
    from peft import LoraConfig

    return LoraConfig(**settings_of(lora))


def settings_of(lora: Mapping[str, LoraPair]) -> dict[str, Any]:
    """Return the settings of peft's config that these matrices decide."""
    first = next(iter(lora.values()))
    return {
        "r": first.rank,
        "lora_alpha": first.alpha,
        "target_modules": "|".join(map(re.escape, lora)),
        "rank_pattern": {
            f"^{name}": pair.rank for name, pair in lora.items() if pair.rank != first.rank
        },
        "alpha_pattern": {
            f"^{name}": pair.alpha for name, pair in lora.items() if pair.alpha != first.alpha
        },
    }


def state_of(lora: Mapping[str, LoraPair]) -> dict[str, Tensor]:
    """Return the matrices by peft's names."""
    sides = (
        (name, side, tensor)
        for name, pair in lora.items()
        for side, tensor in (("A", pair.a), ("B", pair.b))
    )
    return {f"{name}.lora_{side}.weight": tensor for name, side, tensor in sides}
