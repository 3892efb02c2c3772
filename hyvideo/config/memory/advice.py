"""The cheapest change of a run that does not fit, and the fastest run that does.

Every change that is named was evaluated, and a run may have it.
"""

import itertools
from collections.abc import Iterable

from hyvideo.config.memory.cost import duration
from hyvideo.config.memory.network import traffic
from hyvideo.config.memory.phases import memory, settled
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.rules import check

_SMALL_TILE = 128  # pixels; smaller ones show at their seams
_NO_FASTER = 1.01  # times the seconds of the fastest: less than is known of either


def changes_in_order(run: PlannedRun) -> list[dict]:
    """Settings that could be changed, from what costs least (time, then work, then what is trained) to the most."""
    settings = vars(run.settings)
    changes = [
        {"enable_gradient_checkpointing": True, "activation_checkpointing": "full"},
        {"precompute_conditions": True},
        {"reference_mode_offload": True},
        {"reward_offload": True},
        {"batched_forward": "false"},
        {"mini_batch_size_per_update": 1},
        {"validation_batch_size": 1},
        {"enable_fsdp": True},
    ]
    if not 0 < settings["vae_tile_size"] < _SMALL_TILE:
        changes.insert(-1, {"vae_tile_size": _SMALL_TILE})
    for size in range(settings["sp_size"] + 1, run.world_size + 1):
        if run.world_size % size == run.architecture.num_attention_heads % size == 0:
            changes.append({"sp_size": size})
    if not settings["lora_rank"]:
        changes += [{"master_weight_type": "bf16"}, {"use_muon": True}, {"lora_rank": 64}]
    different = ({name: v for name, v in change.items() if settings[name] != v} for change in changes)
    return [change for change in different if change]


def cheapest_change(run: PlannedRun) -> dict | None:
    """The first single change that makes a run fit, else the changes which do together; None if all do not."""
    broken = _broken_rules(run)

    def fits(changes: list[dict]) -> bool:
        return memory(run.with_settings(**_joined(changes))).fits(run.hardware.gpu_memory)

    legal = [change for change in changes_in_order(run) if _broken_rules(run.with_settings(**change)) <= broken]
    combinations = [[change] for change in legal] + [legal[:number] for number in range(2, len(legal) + 1)]
    needed = next(filter(fits, combinations), None)
    if needed is None:
        return None
    for change in reversed(needed):  # the costliest first
        without = [other for other in needed if other is not change]
        needed = without if fits(without) else needed
    return _joined(needed)


def fastest_change(run: PlannedRun) -> dict | None:
    """Change of sharding, recomputation, conditions and batching for the shortest iteration; None if none fits.

    Of runs that take as long, the one with every sample and branch apart, then with the fewest bytes between nodes,
    then with the smallest memory.
    """
    run, found = settled(run), []
    recomputed, kind = run.checkpointing, run.settings.activation_checkpointing
    choices = {
        "dp_replicate": range(1, run.world_size + 1) if run.settings.enable_fsdp else [1],
        "activation_checkpointing": ["selective", "full"] if recomputed != "none" else [kind],
        "precompute_conditions": [False, True],
        "batched_forward": ["false", "true"],
    }
    for values in itertools.product(*choices.values()):
        changed = run.with_settings(**dict(zip(choices, values)))
        if not changed.layout_problems and memory(changed).fits(run.hardware.gpu_memory):
            found.append((duration(changed).total, changed))
    if not found:
        return None
    limit = _NO_FASTER * min(seconds for seconds, _ in found)
    best = min((changed for seconds, changed in found if seconds <= limit), key=_modesty)
    before, after = vars(run.settings), vars(best.settings)
    return {name: after[name] for name in choices if after[name] != before[name]}


def _modesty(run: PlannedRun) -> tuple:
    return run.settings.batched_forward, traffic(run).from_other_nodes, memory(run).peak()


def _joined(changes: Iterable[dict]) -> dict:
    """All changes in one; a larger sp_size takes the place of a smaller one."""
    return {name: value for change in changes for name, value in change.items()}


def _broken_rules(run: PlannedRun) -> set[str]:
    try:
        check(run.config, run.world_size)
    except ValueError as error:
        return {*run.layout_problems, *str(error).splitlines()}
    return set(run.layout_problems)
