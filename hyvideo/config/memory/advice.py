"""The cheapest change of a run that does not fit or is not legal; every change that is named was evaluated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hyvideo.config.memory.legal import combinations_near, problems, with_combination
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import memory
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.settings import Config

_LORA_RANK = 64
_SMALL_TILE = 128  # pixels; smaller ones show at their seams


@dataclass(frozen=True)
class Change:
    """A setting to change: as flags, and as the fields of RunShape that it changes."""

    flag: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """A plan that fits, or None where no change that is known makes it fit."""

    changes: tuple[Change, ...]
    shape: RunShape

    @property
    def flags(self) -> str:
        return " ".join(change.flag for change in self.changes)


def changes_in_order(shape: RunShape, architecture: Architecture) -> Iterator[Change]:
    """What could be changed, from what costs least (time, then work, then what is trained) to what costs most."""
    if shape.activation_checkpointing != "full":
        yield Change("--enable_gradient_checkpointing true", {"activation_checkpointing": "full"})
    if not shape.precompute_conditions:
        yield Change("--precompute_conditions true", {"precompute_conditions": True})
    if shape.has_anchor and not shape.reference_mode_offload:
        yield Change("--reference_mode_offload true", {"reference_mode_offload": True})
    if shape.reward_bytes:
        yield Change("--reward_offload true", {"reward_bytes": 0.0})
    if shape.num_branches > 1 and shape.batch_guidance:
        yield Change("--batch_guidance false", {"batch_guidance": False})
    if shape.mini_batch_size_per_update > 1:
        yield Change("--mini_batch_size_per_update 1", {"mini_batch_size_per_update": 1})
    if not 0 < shape.vae_tile_size <= _SMALL_TILE:
        yield Change(f"--vae_tile_size {_SMALL_TILE}", {"vae_tile_size": _SMALL_TILE})
    if not shape.enable_fsdp:
        yield Change("--enable_fsdp true", {"enable_fsdp": True})
    for sp_size in range(shape.sp_size + 1, shape.world_size + 1):
        if shape.world_size % sp_size == 0 and architecture.num_heads % sp_size == 0:
            yield Change(f"--sp_size {sp_size}", {"sp_size": sp_size})
    if shape.master_weight_type != "bf16":
        yield Change("--master_weight_type bf16", {"master_weight_type": "bf16"})
    if not shape.use_muon and not shape.lora_rank:
        yield Change("--use_muon true", {"use_muon": True})
    if not shape.lora_rank:
        yield Change(f"--lora_rank {_LORA_RANK}", {"lora_rank": _LORA_RANK})


def advise(config: Config, shape: RunShape, architecture: Architecture, gpu_memory: float) -> Advice | None:
    """The first single change that makes a legal run fit, else the changes of which all together do."""

    def works(changes: tuple[Change, ...]) -> bool:
        changed = _changed(shape, changes)
        return not problems(config, changed, architecture) and memory(changed, architecture).fits(gpu_memory)

    known = list(changes_in_order(shape, architecture))
    for change in known:
        if works((change,)):
            return Advice((change,), _changed(shape, (change,)))
    together: tuple[Change, ...] = ()
    for change in known:
        if problems(config, _changed(shape, (*together, change)), architecture):
            continue
        together = (*_others(together, change), change)
        if works(together):
            needed = _without_the_needless(together, works)
            return Advice(needed, _changed(shape, needed))
    return None


def verdict(config: Config, shape: RunShape, architecture: Architecture, gpu_memory: float) -> str:
    """One line: that the run fits, or what to change."""
    found = problems(config, shape, architecture)
    if found:
        near = combinations_near(config, shape, architecture, limit=1000)
        fitting = [c for c in near if memory(with_combination(shape, c), architecture).fits(gpu_memory)]
        nearest = (fitting or near)[:1]
        suffix = f"nearest legal combination{' that fits' if fitting else ''}: {nearest[0]}" if nearest else "none near"
        return f"illegal: {found[0]}; {suffix}"
    needed = memory(shape, architecture).needed_gib
    if needed <= gpu_memory:
        return f"fits: {needed:.1f} of {gpu_memory:g} GiB with what is not counted"
    advice = advise(config, shape, architecture, gpu_memory)
    too_large = f"too large: {needed:.1f} of {gpu_memory:g} GiB with what is not counted"
    if advice is None:
        return f"{too_large}; no known change makes it fit {shape.world_size} GPUs: take more GPUs or smaller videos"
    after = memory(advice.shape, architecture).needed_gib
    return f"{too_large}; the cheapest change that makes it fit: {advice.flags} ({after:.1f} GiB)"


def _changed(shape: RunShape, changes: tuple[Change, ...]) -> RunShape:
    return replace(shape, **{name: value for change in changes for name, value in change.fields.items()})


def _others(changes: tuple[Change, ...], change: Change) -> tuple[Change, ...]:
    """Those that do not set the same field: a larger sp_size takes the place of a smaller one."""
    return tuple(other for other in changes if not other.fields.keys() & change.fields.keys())


def _without_the_needless(changes: tuple[Change, ...], works) -> tuple[Change, ...]:
    """Leaves out what is not needed, the costliest first."""
    for change in reversed(changes):
        rest = tuple(other for other in changes if other is not change)
        if works(rest):
            changes = rest
    return changes
