"""Reading of LoRA files of all programs, by the table in ``lora_spellings.yaml``.

    peft        adapter_model.safetensors, adapter_config.json    base_model.model.<module>.lora_A.weight
    diffusers   pytorch_lora_weights.safetensors, its header      transformer.<module>.lora_A.weight
    ComfyUI     any name                                          diffusion_model.<module>.lora_down.weight
    kohya       any name        lora_unet_<module with underscores in place of dots>.lora_down.weight

A module of a family is found at the end of a name (`LoraNames`), in the layout of diffusers, the original
or ComfyUI; what stands before it must be in the table. Its strength alpha is where the writer put it:
in a tensor <module>.alpha, in the safetensors header, or in adapter_config.json. Without it, alpha is
the rank.

Some files also have differences of whole parameters, such as norms and biases:

    <module>.diff, .diff_b or .diff_m        of the module's weight, bias or modulation
    <module>.lora_B.bias                     of the module's bias, multiplied by alpha / rank
    <parameter>.difference                   in a run's checkpoint

Where diffusers and another layout order a weight's rows differently, the rows of B are reordered, and a
module that another layout fuses becomes several. So the changed weights are the same.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors import safe_open
from torch import Tensor

from hyvideo.files.files import read_json
from hyvideo.files.text import quote
from hyvideo.models.family import Family, families
from hyvideo.models.guidance import OTHER_EXPERT, Expert
from hyvideo.models.lora import Difference, Lora, LoraPair
from hyvideo.weights.file_names import DIFFUSERS_FILE, LORA_FILES, PEFT_FILE
from hyvideo.weights.names import Found
from hyvideo.weights.weight_files import read_safetensors, truncate

PEFT_CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"  # diffusers' key for a LoRA's configuration
EXPERT = "expert"  # our key for the expert of a model of two
ANY_PARAMETER = "difference"

_TABLE = yaml.safe_load(Path(__file__).with_name("lora_spellings.yaml").read_text(encoding="utf-8"))
_SIDE = re.compile(
    r"(?P<module>.+?)\.lora[._](?P<side>A|B|down|up)(?:\.(?P<adapter>[^.]+))?\.(?P<leaf>weight|bias)"
)
_SIDES = {"A": "A", "down": "A", "B": "B", "up": "B"}
_WORDS = [*_TABLE["prefixes"], *_TABLE["experts"]]
_DOTTED_WORDS = "|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True)))
_FLAT_WORDS = "|".join(
    word.replace(".", "_") for word in sorted([*_WORDS, *_TABLE["flat"]], key=len, reverse=True)
)
_KNOWN_DOTTED = re.compile(rf"(?:(?:{_DOTTED_WORDS})\.)*")
_KNOWN_FLAT = re.compile(rf"(?:(?:{_FLAT_WORDS})?_)*")
_EXPERT_WORD = re.compile(rf"(?:^|[._])({'|'.join(_TABLE['experts'])})[._]")
_WRAPPERS = "|".join(_TABLE["wrappers"])
_DOTTED_WRAPPER = re.compile(rf"(?:(?<=\.)|^)(?:{_WRAPPERS})\.")
_FLAT_WRAPPER = re.compile(rf"(?<=_)(?:{_WRAPPERS})_")
_PEFT_PREFIX = "base_model.model."
_MERGE = (
    "Merge it into its base model with the program that made it, in peft with "
    "PeftModel.from_pretrained(...).merge_and_unload(), and use the whole model"
)


@dataclass(frozen=True)
class _Part:
    """A tensor of a file."""

    name: str  # in the file
    kind: str  # A, B, alpha, difference, or shape
    parameter: str  # which it changes, as the file names it
    adapter: str
    tensor: Tensor

    @property
    def is_flat(self) -> bool:
        """Whether the name has underscores in place of dots."""
        module = self.parameter.rpartition(".")[0]
        return "." not in module or module.startswith(tuple(_TABLE["flat"]))

    @property
    def plain(self) -> str:
        """The parameter's name without wrappers of torch."""
        if self.is_flat:
            return _FLAT_WRAPPER.sub("", self.parameter.replace(".", "_"))
        return _DOTTED_WRAPPER.sub("", self.parameter)


class _Placed(NamedTuple):
    part: _Part
    found: Found
    expert: Expert | None  # that the name states


def read_lora(path: str | Path, expert: Expert | None = None) -> Lora:
    """Read a LoRA of any program from a file or its folder, by diffusers' names. Of a file with the
    LoRAs of two experts, the one of ``expert`` is read.

    Raises ValueError if it is missing, invalid, contradicts itself, or has anything that this
    program cannot apply.
    """
    file = _find_file(Path(path))
    tensors, header = read_safetensors(file, "LoRA")
    try:
        parts = _parts(tensors)
        family, placed = _place(parts)
        placed = _of_expert(placed, expert)
        present = [each for each in placed if not each.found.is_foreign]
        _report_foreign(file, placed)
        _check_unique(present)
        settings = _stated_settings(file, header, parts, expert)
        return _to_diffusers(present, settings, family)
    except ValueError as error:
        raise ValueError(f"LoRA {file}: {error}") from error


def expert_of(path: str | Path) -> Expert | None:
    """Return the expert of a model of two that a LoRA file was trained for; None if neither its
    header nor its names of tensors say so, or if it has both.
    """
    with safe_open(_find_file(Path(path)), "pt") as opened:
        stated = (opened.metadata() or {}).get(EXPERT)
        names = list(opened.keys())
    experts = {_expert_in(name) for name in names}
    return stated or (experts.pop() if len(experts) == 1 else None)


def check_expert(path: str | Path, expert: Expert | None, *, setting: str = "expert") -> None:
    """Raise ValueError if a LoRA file was trained for the other expert of a model of two, by its
    header, the names of its tensors or its file name; the message names the ``setting`` to correct.
    """
    if expert is None:
        return
    stated, reason = expert_of(path), "it was trained for"
    if stated is None and not has_both_experts(path):
        stated, reason = _expert_in_file_name(_find_file(Path(path))), "its name says"
    if stated not in (None, expert):
        raise ValueError(
            f"LoRA {path}: {reason} the {stated}-noise expert, got the {expert}-noise expert; "
            f"correct {setting}, use the LoRA of this expert, or set ignore_lora_expert true"
        )


def has_both_experts(path: str | Path) -> bool:
    """Return whether a file has the LoRAs of two experts."""
    with safe_open(_find_file(Path(path)), "pt") as opened:
        return len({_expert_in(name) for name in opened.keys()}) > 1


def _needs_config(file: Path) -> bool:
    if file.name == PEFT_FILE:
        return True
    with safe_open(file, "pt") as opened:
        return any(name.startswith(_PEFT_PREFIX) for name in opened.keys())


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    stem = Path(DIFFUSERS_FILE).stem
    of_experts = [f"{stem}_{expert}_noise.safetensors" for expert in OTHER_EXPERT]
    # the last is in a run's checkpoint
    for name in (*LORA_FILES, *of_experts, f"lora/{DIFFUSERS_FILE}"):
        if (path / name).is_file():
            return path / name
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    hint = "it does not exist"
    if path.exists():
        hint = f"it has {', '.join(truncate([file.name for file in others])) or 'none'}"
    raise ValueError(
        f"LoRA: {path} must be a safetensors file, or a folder with {', '.join(LORA_FILES)} or a "
        f"single safetensors file; {hint}"
    )


# --- tensors and their names ----------------------------------------------------------------------


def _parts(tensors: Mapping[str, Tensor]) -> list[_Part]:
    """Return the tensors of a file with their meanings. Raises ValueError for tensors without one, and
    for more than one adapter.
    """
    parts = [_part(name, tensor) for name, tensor in tensors.items()]
    unknown = [name for name, part in zip(tensors, parts) if part is None]
    if unknown:
        raise ValueError(_method_problem(unknown))
    adapters = sorted({part.adapter for part in parts if part.kind in "AB"})
    if len(adapters) > 1:
        names = ", ".join(adapter or "one without a name" for adapter in adapters)
        raise ValueError(
            f"the file has {len(adapters)} adapters: {names}. Save only one of them, such as with "
            "peft's save_pretrained(..., selected_adapters=[NAME])"
        )
    return parts


def _part(name: str, tensor: Tensor) -> _Part | None:
    match = _SIDE.fullmatch(name)
    if match:
        side, leaf = _SIDES[match["side"]], match["leaf"]
        kind = "bias" if leaf == "bias" else side
        if kind == "bias" and side == "A":
            return None
        return _Part(name, kind, f"{match['module']}.{leaf}", match["adapter"] or "", tensor)
    module, _, end = name.rpartition(".")
    if end == ANY_PARAMETER:
        return _Part(name, "difference", module, "", tensor)
    if module and end in _TABLE["ends"]:
        kind, leaf = _TABLE["ends"][end]
        return _Part(name, kind, f"{module}.{leaf}", "", tensor)
    return None


def _method_problem(unknown: Sequence[str]) -> str:
    for fragment, method in _TABLE["methods"].items():
        for name in unknown:
            if f".{fragment}" in name:
                return f"only plain LoRA is supported, but {name} belongs to {method}. {_MERGE}"
    return (
        f"{len(unknown)} tensors are neither matrices of a LoRA nor differences "
        f"(.{', .'.join(_TABLE['ends'])}): {', '.join(truncate(list(unknown)))}"
    )


def _place(parts: Sequence[_Part]) -> tuple[Family | None, list[_Placed]]:
    """Return the tensors with the modules at the ends of their names, and the family that has most of
    them; without one, the names are diffusers' names of another family.

    Raises ValueError for names that the family does not have, or that begin with something unknown.
    """
    best: tuple[Family | None, list[Found | None]] = (None, [None] * len(parts))
    for family in families():
        if family.lora_names:
            names = [family.lora_names.find(part.plain, is_flat=part.is_flat) for part in parts]
            if names.count(None) < best[1].count(None):
                best = family, names
    family, names = best
    has_other_families = any(each.lora_names is None for each in families())
    if family is None or (None in names and has_other_families):
        return None, [_placed_by_prefix(part) for part in parts]
    placed, problems = [], {}  # one sentence for all tensors with the same problem
    for part, found in zip(parts, names):
        if found is None:
            module = part.parameter.rpartition(".")[0]
            problems.setdefault(module, f"{part.name} belongs to {_owner(part, family)}")
            continue
        known = _KNOWN_FLAT if part.is_flat else _KNOWN_DOTTED
        if not known.fullmatch(found.before):
            before = found.before.rstrip("._")
            problems.setdefault(
                before,
                f"{quote(before)} before {found.parameter.rpartition('.')[0]} in {part.name} is not "
                f"known ({', '.join(_WORDS + _TABLE['flat'])} are); remove it from the names",
            )
        placed.append(_Placed(part, found, _expert_in(part.name)))
    if problems:
        raise ValueError("\n  ".join(truncate(list(problems.values()))))
    return family, placed


def _placed_by_prefix(part: _Part) -> _Placed:
    if part.is_flat and part.parameter.startswith(tuple(_TABLE["flat"])):
        raise ValueError(
            f"{part.name} is no module of a supported transformer, with underscores in place of dots"
        )
    name = _DOTTED_WRAPPER.sub("", part.parameter)
    before = _KNOWN_DOTTED.match(name)[0]
    found = Found(name.removeprefix(before), before, is_diffusers=True, is_foreign=False)
    return _Placed(part, found, _expert_in(part.name))


def _owner(part: _Part, family: Family) -> str:
    for component in _TABLE["components"]:
        if part.name.startswith((f"{component}.", f"{component}_")):
            return f"{component}, which this program does not change"
    return f"no module of the family {family.name}"


def _expert_in(name: str) -> Expert | None:
    """Return the expert that a word in a tensor's name names."""
    match = _EXPERT_WORD.search(name)
    return _TABLE["experts"][match[1]] if match else None


def _of_expert(placed: list[_Placed], expert: Expert | None) -> list[_Placed]:
    """Return the tensors of one expert, if a file has those of both."""
    stated = {each.expert for each in placed}
    if len(stated) == 1:
        return placed
    if expert is None or len(stated) == 3:
        raise ValueError(
            "the file has the LoRAs of two experts (such as transformer. and transformer_2.), but "
            "the model has a single transformer, or nothing says which expert is meant"
        )
    if stated == {None, OTHER_EXPERT[expert]}:
        return [each for each in placed if each.expert is None]
    return [each for each in placed if each.expert == expert]


def _report_foreign(file: Path, placed: Iterable[_Placed]) -> None:
    modules = sorted(
        {each.found.parameter.rpartition(".")[0] for each in placed if each.found.is_foreign}
    )
    if modules:
        warnings.warn(
            f"LoRA {file}: {len(modules)} modules that the model does not have are left out: "
            f"{', '.join(truncate(modules))}",
            stacklevel=3,
        )


def _check_unique(placed: Iterable[_Placed]) -> None:
    """Raise ValueError if two tensors have the same meaning."""
    names: dict[tuple[str, str], str] = {}
    for part, found, _ in placed:
        other = names.setdefault((part.kind, found.parameter), part.name)
        if other != part.name:
            raise ValueError(f"{other} and {part.name} are two tensors for one; remove one of them")


# --- strength -------------------------------------------------------------------------------------


class _Settings(NamedTuple):
    """What a place beside the tensors says about all modules."""

    place: str
    values: Mapping[str, Any]  # by peft's names
    is_kohya: bool = False

    def alpha_of(self, module: str, rank: int) -> float | None:
        alpha = self.values.get("lora_alpha")
        patterns = self.values.get("alpha_pattern")
        if patterns:
            from peft.utils.other import get_pattern_key  # seconds, so not for the other files

            alpha = patterns.get(get_pattern_key(patterns, module), alpha)
        if alpha is None:
            return None
        alpha = _number(alpha, f"alpha in {self.place}")
        return alpha * math.sqrt(rank) if self.values.get("use_rslora") else alpha


def _stated_settings(
    file: Path, header: Mapping[str, str], parts: Sequence[_Part], expert: Expert | None
) -> list[_Settings]:
    """Return what the header and adapter_config.json say. Raises ValueError for settings of peft that
    change the meaning of the matrices.
    """
    names = _TABLE["header"]
    peft_names = dict.fromkeys(names["alpha"], "lora_alpha") | dict.fromkeys(names["rank"], "r")
    for settings in _TABLE["settings"].values():  # of peft's LoraConfig
        peft_names |= {name: name for name in settings}
    stated: list[_Settings] = []
    plain: dict[str, Any] = {}
    for key, text in header.items():
        value = _parsed(text)
        component, _, short = key.lower().rpartition(".")
        name = peft_names.get(short) if component in ("", *_WORDS) else None
        if key == METADATA and not isinstance(value, dict):
            raise ValueError(f"{key} in the header must be a JSON object, got {quote(text)}")
        if isinstance(value, dict) and any(each.endswith("lora_alpha") for each in value):
            stated.append(_Settings(f"{key} of the header", _of_component(value, expert)))
        elif key in names["flat_alpha"] and all(part.is_flat for part in parts):
            stated.append(_Settings(f"{key} of the header", {"lora_alpha": value}, is_kohya=True))
        elif name and plain.setdefault(name, value) != value:
            both = ", ".join(sorted(each for each in header if each in (*names["alpha"], key)))
            raise ValueError(f"the header states {name} twice with different values: {both}")
    stated.append(_Settings("the header", plain))
    config = file.with_name(PEFT_CONFIG)
    if _needs_config(file) and config.is_file():
        stated.append(_Settings(PEFT_CONFIG, read_json(config, "LoRA")))
    elif any(part.name.startswith(_PEFT_PREFIX) for part in parts):
        has_alpha = any(part.kind == "alpha" for part in parts)
        if not has_alpha and not any("lora_alpha" in each.values for each in stated):
            raise ValueError(
                f"peft keeps the strength alpha in {PEFT_CONFIG}, which is missing beside the file; "
                "copy it there"
            )
    for each in stated:
        _check_settings(each)
    return stated


def _of_component(values: Mapping[str, Any], expert: Expert | None) -> dict[str, Any]:
    """Return the settings of the transformer, or of the expert, without its name before theirs."""
    prefixes = (
        ["transformer_2.", "transformer."]
        if expert == "low"
        else ["transformer.", "transformer_2."]
    )
    own = next(
        (prefix for prefix in prefixes if any(name.startswith(prefix) for name in values)), ""
    )
    return {
        name.removeprefix(own): value
        for name, value in values.items()
        if name.startswith(own) or "." not in name
    }


def _check_settings(settings: _Settings) -> None:
    rules = _TABLE["settings"]
    for name, value in settings.values.items():
        is_empty = value in (None, False, "", "none") or value == [] or value == {}
        if name in rules["harmless"] or is_empty:
            continue
        if str(value).lower() in rules["only"].get(name, ()):
            continue
        way_out = _MERGE
        if name == "init_lora_weights":
            way_out = (
                "The matrices are relative to weights that peft changes when it loads them. Save it "
                "again with peft's save_pretrained(..., path_initial_model_for_weight_conversion="
                "FOLDER), which makes a plain LoRA of it"
            )
        raise ValueError(
            f"only plain LoRA is supported, but {settings.place} has {name}: {quote(value)}. {way_out}"
        )


def _parsed(text: str) -> Any:
    """Return a value of a header, which has only texts."""
    literals = {"true": True, "false": False, "none": None, "null": None}
    if text.strip().lower() in literals:
        return literals[text.strip().lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(value: Any, place: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{place} must be a number, got {quote(value)}")
    return float(value)


def _strengths(
    ranks: Mapping[str, int], tensors: Mapping[str, float], settings: Sequence[_Settings]
) -> dict[str, float]:
    """Return alpha by module, which is the rank if nothing states it.

    Raises ValueError if two places contradict each other.
    """
    for stated in settings:
        rank = stated.values.get("r")
        if rank is not None and not stated.values.get("rank_pattern") and ranks:
            if _number(rank, stated.place) not in ranks.values():
                raise ValueError(
                    f"{stated.place} says rank {rank}, the matrices have rank "
                    f"{', '.join(map(str, sorted(set(ranks.values()))))}"
                )
    if tensors.keys() >= ranks.keys():
        for each in settings:
            if each.is_kohya:
                _check_kohya(each, ranks, tensors)
        settings = [each for each in settings if not each.is_kohya]
    alphas = {}
    for module, rank in ranks.items():
        stated = {each.place: each.alpha_of(module, rank) for each in settings}
        stated = {f"alpha of {module}": tensors.get(module)} | stated
        known = {place: alpha for place, alpha in stated.items() if alpha is not None}
        if known and not math.isclose(max(known.values()), min(known.values()), rel_tol=1e-2):
            raise ValueError(
                "the strength is stated twice: "
                + ", ".join(f"{place}: {alpha:g}" for place, alpha in known.items())
                + ". Remove the wrong one"
            )
        alphas[module] = next(iter(known.values()), float(rank))
    return alphas


def _check_kohya(stated: _Settings, ranks: Mapping[str, int], tensors: Mapping[str, float]) -> None:
    """Raise ValueError if a header of the kohya family contradicts the alpha tensors of all modules.

    It has one number, or the word Dynamic, even if modules differ; and converters that multiply
    alpha into the matrices write the rank as tensors and keep the header.
    """
    alpha = stated.values["lora_alpha"]
    is_folded = all(tensors[module] == rank for module, rank in ranks.items())
    if isinstance(alpha, int | float) and alpha not in tensors.values() and not is_folded:
        raise ValueError(
            f"{stated.place} says alpha {alpha}, its tensors say "
            f"{', '.join(f'{each:g}' for each in sorted(set(tensors.values())))}. Remove the wrong one"
        )


# --- changes of the weights -----------------------------------------------------------------------


def _to_diffusers(
    placed: Sequence[_Placed], settings: Sequence[_Settings], family: Family | None
) -> Lora:
    """Return the changes of the weights by diffusers' names."""
    by_kind: dict[str, dict[str, _Placed]] = {}
    for each in placed:
        module = each.found.parameter
        if each.part.kind not in ("difference", "bias"):
            module = module.rpartition(".")[0]
        by_kind.setdefault(each.part.kind, {})[module] = each
    a, b = by_kind.get("A", {}), by_kind.get("B", {})
    differences = _nonzero(by_kind.get("difference", {}))
    if not a and not b and not differences:
        raise ValueError("the file has no lora_A and lora_B weights and no differences")
    for module in a.keys() | b.keys():
        _check_pair(module, a.get(module), b.get(module))
    ranks = {module: len(each.part.tensor) for module, each in a.items()}
    tensors = {module: float(each.part.tensor) for module, each in by_kind.get("alpha", {}).items()}
    changed = {name.rpartition(".")[0] for name in differences}
    unused = [name for name in tensors if name not in ranks and name not in changed]
    unused += [
        each.part.name
        for name, each in by_kind.get("bias", {}).items()
        if name.rpartition(".")[0] not in ranks
    ]
    if unused:
        raise ValueError(f"the file has no matrices for {', '.join(truncate(unused))}")
    alphas = _strengths(ranks, tensors, settings)
    lora: Lora = {}

    def add(each: _Placed, change: LoraPair | Difference) -> None:
        for name, value in _renamed(each.found, change, family).items():
            if name in lora:
                raise ValueError(
                    f"two parts of the file change {name}, one of them {each.part.name}"
                )
            lora[name] = value

    for module, each in a.items():
        pair = LoraPair(each.part.tensor, b[module].part.tensor, alphas[module])
        if pair.a.ndim == 2:
            add(each, pair)
        else:  # of a convolution
            change = pair.alpha / pair.rank * pair.b.flatten(1).float() @ pair.a.flatten(1).float()
            add(each, Difference(change.unflatten(1, pair.a.shape[1:])))
    for name, each in by_kind.get("bias", {}).items():
        module = name.rpartition(".")[0]
        add(each, Difference(alphas[module] / ranks[module] * each.part.tensor))
    for each in differences.values():
        add(each, Difference(each.part.tensor))
    for module, each in by_kind.get("shape", {}).items():
        _check_stated_shape(module, each.part.tensor, a, b, differences)
    return lora


def _check_pair(module: str, a: _Placed | None, b: _Placed | None) -> None:
    shapes = {side: tuple(each.part.tensor.shape) for side, each in (("A", a), ("B", b)) if each}
    is_pair = len(shapes) == 2 and len(shapes["A"]) == len(shapes["B"]) > 1
    if is_pair and len(shapes["A"]) > 2:
        is_pair = set(shapes["B"][2:]) == {1}
    if not is_pair or shapes["A"][0] != shapes["B"][1]:
        raise ValueError(f"{module} needs lora_A (rank, in) and lora_B (out, rank), got {shapes}")


def _nonzero(differences: Mapping[str, _Placed]) -> dict[str, _Placed]:
    """Return the differences that change something.

    Differences of zero are ignored in files of other programs. This project's files keep them,
    because the original fuses some parameters: the bias of the keys may be zero in a fused bias.
    """
    return {
        name: each
        for name, each in differences.items()
        if each.part.name.endswith(f".{ANY_PARAMETER}") or each.part.tensor.any()
    }


def _check_stated_shape(
    module: str,
    shape: Tensor,
    a: Mapping[str, _Placed],
    b: Mapping[str, _Placed],
    differences: Mapping[str, _Placed],
) -> None:
    """Raise ValueError if ComfyUI's ``reshape_weight`` asks for another shape than the file changes."""
    changed = None
    if module in a:
        changed = [len(b[module].part.tensor), *a[module].part.tensor.shape[1:]]
    elif f"{module}.weight" in differences:
        changed = list(differences[f"{module}.weight"].part.tensor.shape)
    if shape.tolist() != changed:
        raise ValueError(
            f"{module}.reshape_weight makes a model of another shape, {shape.tolist()}, than the "
            f"file changes, {changed}: this is a LoRA of another model"
        )


def _renamed(found: Found, change: LoraPair | Difference, family: Family | None) -> Lora:
    """Return a change of a weight by diffusers' names; of a fused module, there are several."""
    is_pair = isinstance(change, LoraPair)
    if found.is_diffusers or family is None:
        rows = {found.parameter: change.b if is_pair else change.tensor}
    else:
        rows = family.lora_names.to_diffusers(
            {found.parameter: change.b if is_pair else change.tensor}
        )
    if is_pair:
        return {
            name.removesuffix(".weight"): LoraPair(change.a, b, change.alpha)
            for name, b in rows.items()
        }
    return {name: Difference(tensor) for name, tensor in rows.items()}


# --- experts --------------------------------------------------------------------------------------


def _expert_in_file_name(file: Path) -> Expert | None:
    """Return the expert that a file's name or its folder's says; None if neither or both."""
    for name, pattern in (
        (file.stem, r"(?<![a-z])(high|low)(?=[^a-z]|$)|(high|low)[ _.-]?noise"),
        (file.parent.name, r"(high|low)[ _.-]?noise"),
    ):
        found = {
            "".join(words) if isinstance(words, tuple) else words
            for words in re.findall(pattern, name.lower())
        }
        if found:
            return found.pop() if len(found) == 1 else None
    return None
