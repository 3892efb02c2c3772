"""Writing of LoRA files for other programs.

    diffusers   pytorch_lora_weights.safetensors, alpha in its header    transformer.<module>.lora_A.weight
    peft        adapter_model.safetensors, adapter_config.json           base_model.model.<module>.lora_A.weight
    original    pytorch_lora_weights.safetensors         <`lora_prefix`><module of the original>.lora_A.weight
    comfyui     pytorch_lora_weights.safetensors         diffusion_model.<module of ComfyUI>.lora_A.weight

Some programs that read the forms original and comfyui ignore alpha (LightX2V its header, FastVideo both), so
it is multiplied into B there. This is exact for a power of two.

Where the other layout fuses several modules, their A are stacked and their B are the blocks of a
block-diagonal matrix. So the changed weights are the same.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.files.files import publish
from hyvideo.models.family import Family, families
from hyvideo.models.guidance import Expert
from hyvideo.models.lora import (
    Difference,
    Lora,
    LoraPair,
    config_of,
    differences_of,
    pairs_of,
    settings_of,
    state_of,
)
from hyvideo.models.lora_files import (
    ANY_PARAMETER,
    DIFFUSERS_FILE,
    EXPERT,
    METADATA,
    PEFT_CONFIG,
    PEFT_FILE,
)
from hyvideo.weights.names import Rename

Form = Literal["diffusers", "peft", "original", "comfyui"]
_PREFIXES = {"diffusers": "transformer.", "peft": "base_model.model."}
_ENDINGS = {"weight": "diff", "bias": "diff_b", "modulation": "diff_m"}


def save_lora(
    lora: Lora, folder: str | Path, *, form: Form = "diffusers", expert: Expert | None = None
) -> None:
    """Save a LoRA in the format ``form``; `read_lora` reads the same changes of the weights.

    ValueError if the format cannot represent it.

    Of a model of two experts, the header names the ``expert``. For the original's programs and
    ComfyUI, so does the file name, because both files have the same tensors.

    Differences are written, too. Only this project reads them in the formats diffusers and peft.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = pairs_of(lora)
    name, metadata = DIFFUSERS_FILE, {"format": "pt"}
    if form in ("original", "comfyui"):
        layout = _layout_of(lora, form)
        prefix = layout.prefix
        pairs = {module: with_alpha_in_b(pair) for module, pair in _in_layout(pairs, layout)}
        differences = _renamed_differences(differences_of(lora), layout)
        if expert:
            name = f"{Path(name).stem}_{expert}_noise.safetensors"
    else:
        prefix = _PREFIXES[form]
        differences = {
            f"{parameter}.{ANY_PARAMETER}": difference.tensor
            for parameter, difference in differences_of(lora).items()
        }
    if form == "diffusers" and pairs:
        # Only these, because an older peft rejects files with unknown settings.
        settings = {prefix + name: value for name, value in settings_of(pairs).items()}
        metadata[METADATA] = json.dumps(settings)
    if form == "peft":
        name = PEFT_FILE
        settings = config_of(pairs).to_dict()
        config = json.dumps(settings, indent=2, sort_keys=True, default=list)  # sets as lists
        (folder / PEFT_CONFIG).write_text(config + "\n")
    if expert:
        metadata[EXPERT] = expert
    tensors = {
        prefix + key: tensor.detach().cpu().contiguous().clone()
        for key, tensor in (state_of(pairs) | differences).items()
    }
    with publish(folder / name) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def family_of_lora(lora: Lora) -> Family | None:
    """Return the family whose names all changes have; None for one that has diffusers' names only."""
    parameters = [f"{name}.weight" for name in pairs_of(lora)] + list(differences_of(lora))
    for family in families():
        names = family.lora_names
        if names and all(names.has(each) for each in parameters):
            return family
    return None


class _Layout(NamedTuple):
    """Names and fused modules of another program's model."""

    rename: Rename  # from diffusers' names
    to_diffusers: Rename
    prefix: str  # of the names in files


def _layout_of(lora: Lora, form: Form) -> _Layout:
    """Return the layout of the original or of ComfyUI for a LoRA. Raises ValueError without one."""
    family = family_of_lora(lora)
    if family is None:
        raise ValueError(
            f"the form {form} is not known for this model's LoRA; save the form diffusers"
        )
    if form == "original":
        to_diffusers = family.transformer.to_diffusers
        return _Layout(family.transformer.to_original, to_diffusers, family.lora_prefix)
    if family.lora_to_comfyui and family.lora_names:
        return _Layout(family.lora_to_comfyui, family.lora_names.to_diffusers, "diffusion_model.")
    raise ValueError(
        f"the form comfyui is not known for the family {family.name}; save the form diffusers"
    )


def _renamed_differences(
    differences: Mapping[str, Difference], layout: _Layout
) -> dict[str, Tensor]:
    """Return the differences by their names in the files of another program."""
    rows = {name: difference.tensor for name, difference in differences.items()}
    renamed = {}
    for name, tensor in layout.rename(rows).items():
        module, _, last = name.rpartition(".")
        if last not in _ENDINGS:
            raise ValueError(
                f"the original's form has no name for a difference of {name}, only of "
                f"{', '.join(_ENDINGS)}. Merge the LoRA into the model instead"
            )
        renamed[f"{module}.{_ENDINGS[last]}"] = tensor
    return renamed


def _rows_without_values(lora: Mapping[str, LoraPair]) -> dict[str, Tensor]:
    """Return the rows of each module, without values, by the name of its weight."""
    return {f"{name}.weight": pair.b[:, :1].to("meta") for name, pair in lora.items()}


def _in_layout(lora: Mapping[str, LoraPair], layout: _Layout) -> Iterator[tuple[str, LoraPair]]:
    """Yield the modules of another layout with their matrices."""
    for name, rows in layout.rename(_rows_without_values(lora)).items():
        sources = [source.removesuffix(".weight") for source in layout.to_diffusers({name: rows})]
        if len(sources) == 1:
            pair = lora[sources[0]]
            b = layout.rename({f"{sources[0]}.weight": pair.b})[name]
            pair = LoraPair(pair.a, b, pair.alpha)
        else:  # the layout fuses them
            pair = _fused([lora.get(source) for source in sources], len(rows))
        yield name.removesuffix(".weight"), pair


def _fused(parts: Sequence[LoraPair | None], num_rows: int) -> LoraPair:
    """Return the matrices of a module that fuses ``parts`` of equally many rows: None changes nothing."""
    known = [part for part in parts if part]
    first = known[0]
    if len(known) == len(parts) and all(
        part.alpha == first.alpha and torch.equal(part.a, first.a) for part in known
    ):
        return LoraPair(first.a, torch.cat([part.b for part in known]), first.alpha)
    if len({part.alpha / part.rank for part in known}) > 1:
        known = [with_alpha_in_b(part) for part in known]
    blocks = iter(known)
    nothing = first.b.new_zeros(num_rows // len(parts), 0)
    b = torch.block_diag(*(next(blocks).b if part else nothing for part in parts))
    a = torch.cat([part.a for part in known])
    return LoraPair(a, b, known[0].alpha / known[0].rank * len(a))


def with_alpha_in_b(pair: LoraPair) -> LoraPair:
    """Return a pair that changes the weight equally and whose alpha is the rank, the value of files
    without alpha.
    """
    b = (pair.b.double() * (pair.alpha / pair.rank)).to(pair.b.dtype)
    return LoraPair(pair.a, b, alpha=float(pair.rank))
