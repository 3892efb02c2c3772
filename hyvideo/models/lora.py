"""Reading and writing of LoRA files in all common formats, and LoRA adapters (peft) of the
diffusers transformer.

    peft        adapter_model.safetensors, adapter_config.json    base_model.model.<module>.lora_A.weight
    diffusers   pytorch_lora_weights.safetensors, its metadata     <module>.lora_A.weight or transformer.<module>...
    original    pytorch_lora_weights.safetensors, its metadata     <module>.lora_A.weight with the original's modules;
                with a `lora_prefix`, no metadata: <prefix><module>.lora_A.weight and <prefix><module>.alpha
    comfyui     as original with the prefix diffusion_model. and the modules of ComfyUI's model
    kohya       any name, only read; the original's modules with underscores in place of dots:
                lora_unet_<module>.lora_down.weight and lora_unet_<module>.alpha

diffusers' ``load_lora_adapter``, which the original's programs also use, reads alpha from the
metadata; without metadata, alpha is the rank. Some programs write ``lora_down`` and ``lora_up``
instead of ``lora_A`` and ``lora_B``.

A LoRA adds ``alpha / rank * B A`` to a weight. Some files also have differences of whole parameters,
such as norms and biases, which are added to the base weights before an adapter is made:

    <module>.diff, .diff_b or .diff_m        of the module's weight, bias or modulation
    <parameter>.difference                   in a run's checkpoint, in the formats diffusers and peft

Where diffusers and another layout order a weight's rows differently, the rows of B are reordered.
Where the other layout fuses several modules, their A are stacked and their B are the blocks of a
block-diagonal matrix. So the changed weights are the same.
"""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.data.files import publish, read_json
from hyvideo.models.family import Component, Family, families, family_of
from hyvideo.models.guidance import OTHER_EXPERT, Expert
from hyvideo.models.names import Rename
from hyvideo.models.original_checkpoint import renamed_by_family
from hyvideo.models.weight_files import read_safetensors, truncate

if TYPE_CHECKING:
    from peft import LoraConfig

Form = Literal["diffusers", "peft", "original", "comfyui"]
LORA_FILES = _PEFT_FILE, _DIFFUSERS_FILE = (
    "adapter_model.safetensors",
    "pytorch_lora_weights.safetensors",
)
_PEFT_CONFIG = "adapter_config.json"
_METADATA = "lora_adapter_metadata"  # diffusers' key for a LoRA's configuration
_EXPERT = "expert"  # our key for the expert of a model of two
# Only these settings are written to the metadata, because an older peft rejects files with unknown
# settings.
_SETTINGS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern")
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B|down|up)(?:\.\w+)?\.weight")
_SIDES = {"down": "A", "up": "B"}
_FLAT_PREFIX = "lora_unet_"
_COMFYUI_PREFIX = "diffusion_model."
_PREFIXES = ("base_model.model.", "transformer.", "model.", _COMFYUI_PREFIX)
# Differences of a module's parameters in files of lightx2v, and of any parameter in checkpoints.
_DIFFERENCES = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}
_ANY_PARAMETER = "difference"
# Settings that change the meaning of A and B, and are not supported.
_UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "fan_in_fan_out", "lora_bias")


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


def read_lora(path: str | Path) -> Lora:
    """Read a LoRA in any format from a file or its folder.

    Raises ValueError if missing, invalid or unsupported.
    """
    file = _find_file(Path(path))
    tensors, metadata = read_safetensors(file, "LoRA")
    try:
        settings = json.loads(metadata[_METADATA]) if _METADATA in metadata else {}
        settings = {name.removeprefix("transformer."): value for name, value in settings.items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"LoRA: the metadata of {file} must be a JSON object ({error})") from error
    if file.name == _PEFT_FILE:
        settings = read_json(file.with_name(_PEFT_CONFIG), "LoRA")
    unsupported = [name for name in _UNSUPPORTED if settings.get(name)]
    if unsupported:
        raise ValueError(f"LoRA {file}: only plain LoRA is supported, got {', '.join(unsupported)}")
    pairs = {
        _with_dots(module, file): pair for module, pair in _pairs(tensors, settings, file).items()
    }
    lora = pairs | _differences(tensors, file)
    for family in families():
        if any(re.match(family.original_modules, module) for module in pairs):
            return _to_diffusers(_without_foreign(lora, family, file), family, file)
    return lora


def _without_foreign(lora: Lora, family: Family, file: Path) -> Lora:
    """Return a LoRA without the modules of `Family.foreign_modules`, which a warning names."""
    dropped = [
        name for name in lora if family.foreign_modules and re.match(family.foreign_modules, name)
    ]
    if dropped:
        warnings.warn(
            f"LoRA {file}: {len(dropped)} modules that the model does not have are left out: "
            f"{', '.join(truncate(sorted(dropped)))}",
            stacklevel=3,
        )
    return {name: value for name, value in lora.items() if name not in dropped}


def expert_of(path: str | Path) -> Expert | None:
    """Return the expert of a model of two that a LoRA file was trained for; None if its metadata
    name none, as in files of other programs.
    """
    with safe_open(_find_file(Path(path)), "pt") as opened:
        return (opened.metadata() or {}).get(_EXPERT)


def check_expert(path: str | Path, expert: Expert | None, *, setting: str = "expert") -> None:
    """Raise ValueError if a LoRA file was trained for the other expert of a model of two; the
    message names the ``setting`` to correct.
    """
    named = expert_of(path)
    if expert and named not in (None, expert):
        raise ValueError(
            f"LoRA {path}: it was trained for the {named}-noise expert, got the {expert}-noise "
            f"expert; correct {setting}, or use the LoRA of this expert"
        )


def add_lora(transformer: nn.Module, lora: Lora, *, scale: float = 1.0) -> None:
    """Add a LoRA to a transformer for sampling, scaled by ``scale``, and freeze all weights.

    Differences are added to the weights, in float32 and rounded to their dtype. Raises ValueError,
    before anything is changed, if a module, a parameter or a shape does not match the transformer.
    """
    from peft import set_peft_model_state_dict

    check_lora(transformer, lora)
    parameters = dict(transformer.named_parameters())
    with torch.no_grad():
        for name, difference in differences_of(lora).items():
            change = scale * difference.tensor.float()
            parameters[name].copy_(parameters[name].float() + change.to(parameters[name].device))
    pairs = pairs_of(lora)
    _add_adapter(transformer, _config_of(pairs))
    loaded = set_peft_model_state_dict(transformer, _state(pairs))
    assert not loaded.unexpected_keys and not any("lora_" in key for key in loaded.missing_keys)
    transformer.set_adapters("default", weights=scale)
    transformer.requires_grad_(False)


def check_lora(transformer: nn.Module, lora: Lora) -> None:
    """Raise ValueError if modules, parameters or shapes of the LoRA do not match the transformer; it
    may be on the meta device.
    """
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


def current_lora(
    transformer: nn.Module, *, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Lora:
    """Return a copy of the transformer's adapter as a LoRA on the CPU; ``gather`` turns a sharded
    tensor into a full one.
    """
    state = {
        name.replace(".default.", "."): gather(parameter.detach()).to("cpu", copy=True)
        for name, parameter in transformer.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }
    return _pairs(state, vars(transformer.peft_config["default"]), Path("adapter"))


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
    selects. Raises ValueError for targets without a match, and if ``start`` has another rank,
    another alpha or other modules.
    """
    from peft import LoraConfig

    if start is None:
        names = target_modules(transformer, targets or [family_of(transformer).target_modules])
        # A regular expression, because peft would match a list with longer names, too.
        return LoraConfig(r=rank, lora_alpha=alpha, target_modules="|".join(map(re.escape, names)))
    check_lora(transformer, start)
    pairs = pairs_of(start)
    found = {(pair.rank, pair.alpha) for pair in pairs.values()}
    if found != {(rank, alpha)}:
        needed = ", ".join(f"{rank} and {alpha:g}" for rank, alpha in sorted(found))
        raise ValueError(
            "lora_rank and lora_alpha must equal those of the LoRA in pretrained_lora_path, which "
            f"is trained further: got {rank} and {alpha:g}, need {needed}. Set these, or lora_rank "
            "0 to merge it and train all weights"
        )
    if targets:
        unused = family_of(transformer).without_gradient(transformer)
        modules = {name for name in pairs if not name.startswith(unused)}
        different = modules.symmetric_difference(target_modules(transformer, targets))
        if different:
            raise ValueError(
                "lora_target_modules must select the modules of the LoRA in pretrained_lora_path: "
                f"{min(different)} is in only one of them. Omit lora_target_modules to train the "
                "file's modules"
            )
    return _config_of(pairs)


def target_modules(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the names of the trainable linear layers that match one of ``targets``.

    A target is a regular expression for names, or for their ends after a dot, in the transformer or
    the original: ``img_attn_q`` selects ``attn.to_q`` in all blocks. Raises ValueError without a
    match.
    """
    family = family_of(transformer)
    unused = family.without_gradient(transformer)
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
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
    transformer.add_adapter(config)
    for module in transformer.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            # leave casting to autocast: peft would cast all tokens to float32
            module.cast_input_dtype_enabled = False


def with_lora(weights: Iterable[tuple[str, Tensor]], lora: Lora) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) pairs with the LoRA and its differences added in float32; meta tensors
    are yielded unchanged.
    """
    pairs = pairs_of(lora)
    differences = differences_of(lora)
    for name, weight in weights:
        if not weight.is_meta:
            pair = pairs.get(name.removesuffix(".weight"))
            if pair:
                change = pair.alpha / pair.rank * pair.b.float() @ pair.a.float()
                weight = weight.float() + change.to(weight.device)
            difference = differences.get(name)
            if difference:
                weight = weight.float() + difference.tensor.float().to(weight.device)
        yield name, weight


def save_lora(
    lora: Lora, folder: str | Path, *, form: Form = "diffusers", expert: Expert | None = None
) -> None:
    """Save a LoRA in the format ``form``; `read_lora` reads the same changes of the weights.

    ValueError if the format cannot represent it.

    In the original's format with a `lora_prefix`, diffusers reads alpha only of modules in the
    blocks. For others, B is multiplied by alpha / rank, which is exact for a power of two.

    Of a model of two experts, the metadata name the ``expert``. For the original's programs and
    ComfyUI, so does the file name, because both files have the same tensors.

    Differences are written, too. Only this project reads them in the formats diffusers and peft.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = pairs_of(lora)
    prefix = ""
    differences = {
        f"{name}.{_ANY_PARAMETER}": difference.tensor
        for name, difference in differences_of(lora).items()
    }
    if form in ("original", "comfyui"):
        layout = _layout_of(pairs, form)
        pairs = _renamed_pairs(pairs, layout)
        prefix = layout.prefix
        differences = _renamed_differences(differences_of(lora), layout)
    settings = _config_of(pairs).to_dict()
    file = _DIFFUSERS_FILE
    metadata = {_METADATA: json.dumps({name: settings[name] for name in _SETTINGS})}
    if form == "peft":
        file = _PEFT_FILE
        prefix = "base_model.model."
        metadata = {}
        config = json.dumps(settings, indent=2, sort_keys=True, default=list)  # sets as lists
        (folder / _PEFT_CONFIG).write_text(config + "\n")
    tensors = {
        prefix + name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in (_state(pairs) | differences).items()
    }
    if prefix and form != "peft":  # the original's programs and ComfyUI read no metadata
        metadata = {}
        exact = torch.float64
        tensors |= {
            f"{prefix}{name}.alpha": torch.tensor(pair.alpha, dtype=exact)
            for name, pair in pairs.items()
            if pair.alpha != pair.rank
        }
    if expert:
        metadata |= {_EXPERT: expert}
        if form in ("original", "comfyui"):
            file = f"{Path(file).stem}_{expert}_noise.safetensors"
    with publish(folder / file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"} | metadata)


def lora_files(path: str | Path) -> list[Path]:
    """Return the files that a LoRA is read from. Raises ValueError if there are none."""
    file = _find_file(Path(path))
    config = file.with_name(_PEFT_CONFIG)
    return [file, config] if file.name == _PEFT_FILE and config.is_file() else [file]


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    stem = Path(_DIFFUSERS_FILE).stem
    of_experts = [f"{stem}_{expert}_noise.safetensors" for expert in OTHER_EXPERT]
    # the last is in a run's checkpoint
    for name in (*LORA_FILES, *of_experts, f"lora/{_DIFFUSERS_FILE}"):
        if (path / name).is_file():
            return path / name
    hint = "" if path.exists() else "; this path does not exist"
    raise ValueError(
        f"LoRA: {path} must be a safetensors file, or a folder with {' or '.join(LORA_FILES)}{hint}"
    )


def _pairs(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], file: Path
) -> dict[str, LoraPair]:
    """Return the LoRA matrices by module; alpha defaults to the rank."""
    from peft.utils.other import get_pattern_key

    sides: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        short = _without_prefix(name)
        match = _KEY.fullmatch(short)
        if short.endswith(".alpha"):
            alphas[short.removesuffix(".alpha")] = float(tensor)
        elif match:
            side = _SIDES.get(match["side"], match["side"])
            sides.setdefault(match["module"], {})[side] = tensor
        elif not _changed_parameter(short):
            raise ValueError(
                f"LoRA {file}: tensor {name!r} is not a lora_A or lora_B weight, and not a "
                f"difference (.{', .'.join(_DIFFERENCES)})"
            )
    if not sides:
        raise ValueError(f"LoRA {file}: the file has no lora_A and lora_B weights")
    pairs = {}
    for module, pair in sides.items():
        shapes = {side: tuple(tensor.shape) for side, tensor in sorted(pair.items())}
        is_complete = set(pair) == {"A", "B"} and all(tensor.ndim == 2 for tensor in pair.values())
        if not is_complete or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ValueError(
                f"LoRA {file}: {module} needs lora_A (rank, in) and lora_B (out, rank), got "
                f"{shapes}"
            )
        for tensor in pair.values():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"LoRA {file}: the weights of {module} must be floating-point numbers; use "
                    "another file"
                )
        patterns = settings.get("alpha_pattern") or {}
        alpha = patterns.get(
            get_pattern_key(patterns, module), settings.get("lora_alpha", len(pair["A"]))
        )
        alpha = alphas.get(module, alpha)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"LoRA {file}: alpha of {module} must be a finite number, got {alpha}")
        pairs[module] = LoraPair(pair["A"], pair["B"], float(alpha))
    return pairs


def _differences(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Difference]:
    """Return the differences by parameter.

    Differences of zero are ignored in files of other programs. This project's files keep them,
    because the original fuses some parameters: the bias of the keys may be zero in a fused bias.
    """
    found = {}
    for name, tensor in tensors.items():
        parameter = _changed_parameter(_without_prefix(name))
        if not parameter:
            continue
        if not name.endswith(f".{_ANY_PARAMETER}") and not tensor.any():
            continue
        if not tensor.is_floating_point():
            raise ValueError(
                f"LoRA {file}: {name!r} must have floating-point numbers; use another file"
            )
        module, dot, last = parameter.rpartition(".")
        found[_with_dots(module, file) + dot + last] = Difference(tensor)
    return found


def _changed_parameter(name: str) -> str | None:
    """Return the parameter that a tensor of a file is the difference of; None for other tensors."""
    module, _, ending = name.rpartition(".")
    if ending == _ANY_PARAMETER:
        return module
    if ending in _DIFFERENCES:
        return f"{module}.{_DIFFERENCES[ending]}"
    return None


def _without_prefix(name: str) -> str:
    return functools.reduce(str.removeprefix, _PREFIXES, name)


def _with_dots(module: str, file: Path) -> str:
    """Return a module's name; names of kohya's files get the original's dots."""
    if not module.startswith(_FLAT_PREFIX):
        return module
    for family in families():
        name = family.transformer.with_dots(module.removeprefix(_FLAT_PREFIX))
        if name:
            return name
    raise ValueError(
        f"LoRA {file}: {module} is no module of a supported transformer, with underscores in place "
        "of dots. musubi-tuner's convert_lora.py --target other writes names with dots"
    )


def _to_diffusers(lora: Lora, family: Family, file: Path) -> Lora:
    try:
        return _renamed(lora, family.transformer.to_diffusers)
    except ValueError as error:
        if family.lora_from_comfyui:
            with suppress(ValueError):
                return _renamed(lora, family.lora_from_comfyui)
        raise ValueError(f"LoRA {file}: {error}") from error


def _renamed(lora: Lora, to_diffusers: Rename) -> Lora:
    renamed: Lora = {}
    for module, pair in pairs_of(lora).items():
        rows = to_diffusers({f"{module}.weight": pair.b})
        renamed |= {
            name.removesuffix(".weight"): LoraPair(pair.a, b, pair.alpha)
            for name, b in rows.items()
        }
    for parameter, difference in differences_of(lora).items():
        rows = to_diffusers({parameter: difference.tensor})
        renamed |= {name: Difference(tensor) for name, tensor in rows.items()}
    return renamed


class _Layout(NamedTuple):
    """Names and fused modules of another program's model."""

    family: Family
    rename: Rename  # from diffusers' names
    to_diffusers: Rename
    prefix: str  # of the names in files


def _layout_of(lora: Mapping[str, LoraPair], form: Form) -> _Layout:
    """Return the layout of the original or of ComfyUI for a LoRA. Raises ValueError without one."""
    family = renamed_by_family("transformer", "to_original", _rows_without_values(lora))[1]
    component = family.transformer
    original = _Layout(family, component.to_original, component.to_diffusers, family.lora_prefix)
    if form == "original" or family.lora_prefix == _COMFYUI_PREFIX:
        return original
    if family.lora_to_comfyui and family.lora_from_comfyui:
        return _Layout(family, family.lora_to_comfyui, family.lora_from_comfyui, _COMFYUI_PREFIX)
    raise ValueError(
        f"the form comfyui is not known for the family {family.name}; save the form diffusers"
    )


def _renamed_differences(
    differences: Mapping[str, Difference], layout: _Layout
) -> dict[str, Tensor]:
    """Return the differences by their names in the files of another program."""
    endings = {parameter: ending for ending, parameter in _DIFFERENCES.items()}
    rows = {name: difference.tensor for name, difference in differences.items()}
    renamed = {}
    for name, tensor in layout.rename(rows).items():
        module, _, last = name.rpartition(".")
        if last not in endings:
            raise ValueError(
                f"the original's form has no name for a difference of {name}, only of "
                f"{', '.join(endings)}. Merge the LoRA into the model instead"
            )
        renamed[f"{module}.{endings[last]}"] = tensor
    return renamed


def _renamed_pairs(lora: Mapping[str, LoraPair], layout: _Layout) -> dict[str, LoraPair]:
    """Return the LoRA under the names of another program."""
    family = layout.family
    renamed = {}
    for name, pair, sources in _in_layout(lora, layout):
        if family.lora_prefix and not sources[0].startswith(f"{family.blocks}."):
            pair = _with_alpha_in_b(pair)
        renamed[name] = pair
    if family.lora_prefix and not any(name.startswith(f"{family.blocks}.") for name in lora):
        raise ValueError(
            f"the original's form needs at least one module of the transformer's {family.blocks}, "
            "because diffusers reads no other file in this form; got "
            f"{', '.join(truncate(sorted(lora)))}. Save the form diffusers"
        )
    return renamed


def _rows_without_values(lora: Mapping[str, LoraPair]) -> dict[str, Tensor]:
    """Return the rows of each module, without values, by the name of its weight."""
    return {f"{name}.weight": pair.b[:, :1].to("meta") for name, pair in lora.items()}


def _in_layout(
    lora: Mapping[str, LoraPair], layout: _Layout
) -> Iterator[tuple[str, LoraPair, list[str]]]:
    """Yield the modules of another layout: name, matrices, and names of the diffusers modules that
    form this one: three if the layout fuses them.
    """
    for name, rows in layout.rename(_rows_without_values(lora)).items():
        sources = [source.removesuffix(".weight") for source in layout.to_diffusers({name: rows})]
        if len(sources) == 1:
            pair = lora[sources[0]]
            b = layout.rename({f"{sources[0]}.weight": pair.b})[name]
            pair = LoraPair(pair.a, b, pair.alpha)
        else:
            pair = _fused([lora.get(source) for source in sources], len(rows))
        yield name.removesuffix(".weight"), pair, sources


def _fused(parts: Sequence[LoraPair | None], num_rows: int) -> LoraPair:
    """Return the matrices of a module that fuses ``parts`` of equally many rows: None changes nothing."""
    known = [part for part in parts if part]
    first = known[0]
    if len(known) == len(parts) and all(
        part.alpha == first.alpha and torch.equal(part.a, first.a) for part in known
    ):
        return LoraPair(first.a, torch.cat([part.b for part in known]), first.alpha)
    if len({part.alpha / part.rank for part in known}) > 1:
        known = [_with_alpha_in_b(part) for part in known]
    blocks = iter(known)
    nothing = first.b.new_zeros(num_rows // len(parts), 0)
    b = torch.block_diag(*(next(blocks).b if part else nothing for part in parts))
    a = torch.cat([part.a for part in known])
    return LoraPair(a, b, known[0].alpha / known[0].rank * len(a))


def _with_alpha_in_b(pair: LoraPair) -> LoraPair:
    """Return a pair that changes the weight equally and whose alpha is the rank, the value of files
    without alpha.
    """
    b = (pair.b.double() * (pair.alpha / pair.rank)).to(pair.b.dtype)
    return LoraPair(pair.a, b, alpha=float(pair.rank))


def _config_of(lora: Mapping[str, LoraPair]) -> "LoraConfig":
    from peft import LoraConfig

    first = next(iter(lora.values()))
    return LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,
        target_modules="|".join(map(re.escape, lora)),
        rank_pattern={
            f"^{name}": pair.rank for name, pair in lora.items() if pair.rank != first.rank
        },
        alpha_pattern={
            f"^{name}": pair.alpha for name, pair in lora.items() if pair.alpha != first.alpha
        },
    )


def _state(lora: Mapping[str, LoraPair]) -> dict[str, Tensor]:
    sides = (
        (name, side, tensor)
        for name, pair in lora.items()
        for side, tensor in (("A", pair.a), ("B", pair.b))
    )
    return {f"{name}.lora_{side}.weight": tensor for name, side, tensor in sides}
