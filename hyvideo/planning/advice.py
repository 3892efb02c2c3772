"""The cheapest change that makes a run fit, and the fastest settings that fit, computed by the
planner.
"""

import itertools
import math
from collections.abc import Iterator

from hyvideo.planning.cost import duration
from hyvideo.planning.memory import memory, resolve_auto
from hyvideo.planning.network import traffic
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.problems import problem_of
from hyvideo.settings.rules import check

SMALL_TILE = 128  # pixels; smaller tiles have visible seams
_TILES = 256, 384  # pixels, as tried for the fastest run; whole frames may need 30 GiB
# runs within this factor of the fastest count as equal, within the accuracy of the prediction
_EQUALLY_FAST = 1.03
# batches must be faster than this under grpo, whose ratio is then only nearly 1 in the first update
_INEXACT = 1.1
_LAYOUT = "sp_size", "batch_size", "gradient_accumulation_steps"


def changes_in_order(run: PlannedRun) -> list[dict]:
    """Return possible changes in the order of lost speed, then those to the precision and number of
    trained weights.
    """
    settings, sizes = vars(run.settings), range(run.settings.sp_size + 1, run.world_size + 1)
    has_small_tiles = 0 < settings["vae_tile_size"] < SMALL_TILE
    changes = [
        {"precompute_conditions": True},
        {"reference_mode_offload": True},
        {"vae_offload": True},
        {"reward_offload": True, "score_between_stages": True} if run.reward_bytes else {},
        {"batched_forward": "false"},
        {"mini_batch_size_per_update": 1},
        {"validation_batch_size": 1},
        {"enable_gradient_checkpointing": True, "activation_checkpointing": "full"},
        {} if has_small_tiles else {"vae_tile_size": SMALL_TILE},
        {"enable_fsdp": True} if run.world_size > 1 else {},
        *(
            {"sp_size": n}
            for n in sizes
            if run.world_size % n == run.architecture.num_attention_heads % n == 0
        ),
    ]
    if settings["lora_rank"]:
        changes += [{"base_weight_dtype": "fp8"}]
    else:
        changes += [{"master_weight_type": "bf16"}, {"use_muon": True}, {"lora_rank": 64}]
        changes += [{"lora_rank": 64, "base_weight_dtype": "fp8"}]
    different = (
        {name: v for name, v in change.items() if settings[name] != v} for change in changes
    )
    return [change for change in different if change]


def cheapest_change(run: PlannedRun) -> dict | None:
    """Return the legal combination of changes that makes a run fit with the least loss of speed, or
    None.
    """
    broken = _broken_rules(run)

    def joined(changes: list[dict]) -> dict:  # a larger sp_size replaces a smaller one
        return {name: value for change in changes for name, value in change.items()}

    def fits(changes: list[dict]) -> bool:
        changed = run.with_settings(**joined(changes))
        return memory(changed).fits(run.hardware.gpu_memory) and _broken_rules(changed) <= broken

    # The changes are ordered by their loss of speed, and each lowers the memory or leaves it. The
    # first changes that fit together are therefore the cheapest ones, except for those among them
    # that are not needed: these are removed again, the most expensive first.
    legal = [
        change
        for change in changes_in_order(run)
        if _broken_rules(run.with_settings(**change)) <= broken
    ]
    needed = next(filter(fits, (legal[:number] for number in range(1, len(legal) + 1))), None)
    if needed is None:
        return None
    for change in reversed(needed):  # most expensive first
        without = [other for other in needed if other is not change]
        needed = without if fits(without) else needed
    return joined(needed)


def fastest_change(run: PlannedRun) -> dict | None:
    """Return the change for the fastest iteration with as many rollouts, or None if nothing fits.

    Among equally fast runs, prefers no batching of samples and branches, the least traffic between
    nodes, the smallest memory.
    """
    run = resolve_auto(run)
    world, broken = range(1, run.world_size + 1), _broken_rules(run)
    choices = {
        "dp_replicate": [n for n in world if run.world_size % n == 0]
        if run.settings.enable_fsdp
        else [1],
        "precompute_conditions": [False, True],
        "batched_forward": ["false", "true"],
        "vae_tile_size": list(dict.fromkeys([run.settings.vae_tile_size, *_TILES])),
    }
    if run.checkpointing != "none":
        choices["activation_checkpointing"] = ["selective", "full"]
    changed = [
        layout.with_settings(**dict(zip(choices, values)))
        for layout in _layouts(run)
        for values in itertools.product(*choices.values())
    ]
    legal = [
        other
        for other in changed
        if not other.problems and memory(other).fits(run.hardware.gpu_memory)
    ]
    if not legal:
        return None
    seconds = [duration(other).total * (_INEXACT if _is_inexact(other) else 1) for other in legal]
    limit = _EQUALLY_FAST * min(seconds)
    own = next(
        (time for other, time in zip(legal, seconds) if other.config == run.config), math.inf
    )
    if own <= limit:  # a change must not be slower, not even slightly
        limit = own
    fast = [other for other, time in zip(legal, seconds) if time <= limit]
    fast.sort(
        key=lambda r: (r.settings.batched_forward, traffic(r).from_other_nodes, memory(r).peak())
    )
    best = next((other for other in fast if _broken_rules(other) <= broken), run)
    before, after = vars(run.settings), vars(best.settings)
    return {name: after[name] for name in (*_LAYOUT, *choices) if after[name] != before[name]}


def _is_inexact(run: PlannedRun) -> bool:
    """Return whether rollout and update have different batch shapes, which round differently, and a
    ratio of both.
    """
    return run.config.objective.has_ratio and run.settings.batched_forward == "true"


def _layouts(run: PlannedRun) -> Iterator[PlannedRun]:
    """Yield the run with every legal sp_size within a node, and with batches that keep the number
    of rollouts.
    """
    for sp_size in range(1, min(run.world_size, run.hardware.gpus_per_node) + 1):
        rows, rest = divmod(run.rollouts_per_replica * sp_size, run.settings.sp_size)
        if rest == run.world_size % sp_size == run.architecture.num_attention_heads % sp_size == 0:
            batch = math.gcd(rows, run.settings.batch_size * sp_size // run.settings.sp_size)
            yield run.with_settings(
                sp_size=sp_size, batch_size=batch, gradient_accumulation_steps=rows // batch
            )


def _broken_rules(run: PlannedRun) -> set[str]:
    broken = problem_of(lambda: check(run.config, run.world_size, on_this_machine=False))
    return {*run.problems, *"\n".join(broken).splitlines()}
