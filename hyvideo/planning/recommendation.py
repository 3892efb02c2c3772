"""One command for a run that fits its GPUs: the given one, or with the changes that cost least."""

import shlex

from hyvideo.checks.rules import check
from hyvideo.files.text import lines_of
from hyvideo.planning.hours import iteration_flops
from hyvideo.planning.memory import memory, resolve_auto
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.problems import problem_of

SMALL_TILE = 128  # pixels; smaller tiles have visible seams


def changes_in_order(run: PlannedRun) -> list[dict]:
    """Return possible changes in the order of lost speed, then those to the precision and number of
    trained weights.
    """
    settings = vars(run.settings)
    changes = [
        {"precompute_conditions": True},
        {"offload": ["anchor"]},
        {"offload": ["vae"]},
        {"batched_forward": "false"},
        {"mini_batch_size_per_update": 1},
        {"validation_batch_size": 1},
        {"activation_checkpointing": "full"},
    ]
    if run.reward_bytes:
        changes.insert(3, {"offload": ["reward"]})
    if not 0 < settings["vae_tile_size"] < SMALL_TILE:
        changes.append({"vae_tile_size": SMALL_TILE})
    if run.world_size > 1:
        changes.append({"enable_fsdp": True})
    for number in range(settings["sp_size"] + 1, run.hardware.gpus_per_node + 1):
        if run.world_size % number == run.architecture.num_attention_heads % number == 0:
            changes.append(_with_rollouts_kept(run, number))
    if settings["lora_rank"]:
        changes.append({"base_weight_dtype": "fp8"})
    else:
        changes += [{"optimizer": "muon"}, {"lora_rank": 64}]
        changes.append({"lora_rank": 64, "base_weight_dtype": "fp8"})
    changes = [
        {name: _added(settings[name], value) for name, value in change.items()}
        for change in changes
    ]
    different = [
        {name: value for name, value in change.items() if settings[name] != value}
        for change in changes
    ]
    return [change for change in different if change]


def _with_rollouts_kept(run: PlannedRun, sp_size: int) -> dict:
    """Return the change to ``sp_size`` and to the batches, of which there are more for the fewer
    replicas, so that an iteration has as many rollouts.
    """
    batches = run.settings.gradient_accumulation_steps * sp_size
    if batches % run.settings.sp_size:
        return {"sp_size": sp_size}
    return {
        "sp_size": sp_size,
        "gradient_accumulation_steps": batches // run.settings.sp_size,
    }


def cheapest_change(run: PlannedRun) -> dict | None:
    """Return the legal combination of changes that makes a run fit with the least loss of speed:
    empty if it fits as it is, None if nothing fits.
    """
    if _fits(run):
        return {}
    broken = _broken_rules(run)
    legal = [
        change
        for change in changes_in_order(run)
        if _broken_rules(run.with_settings(**change)) <= broken
    ]

    def is_enough(changes: list[dict]) -> bool:
        changed = run.with_settings(**_joined(changes))
        return _fits(changed) and _broken_rules(changed) <= broken

    # Each change lowers the memory or leaves it. The first changes that fit together are therefore
    # the cheapest ones, except for those that are not needed. These are removed again, the most
    # expensive first.
    needed = None
    for number in range(1, len(legal) + 1):
        if is_enough(legal[:number]):
            needed = legal[:number]
            break
    if needed is None:
        return None
    for change in reversed(needed):
        without = [other for other in needed if other is not change]
        if is_enough(without):
            needed = without
    return _joined(needed)


def recommendation(run: PlannedRun, words: list[str]) -> list[str]:
    """Return a command with the flags ``words`` that fits the GPUs, and a verdict on the given one."""
    if run.problems:
        return [f"illegal: {run.problems[0]}"]
    size = f"{memory(run).needed_gib:.1f} of {run.hardware.gpu_memory:g} GiB"
    change = cheapest_change(run)
    if change is None:
        return [f"too large: {size}; no known change makes it fit; use more GPUs or smaller videos"]
    rows = [("command", command(_program(run), words, change))]
    if not change:
        return [*lines_of(rows), f"fits: {size}, including CUDA context and fragmentation"]
    changed = run.with_settings(**change)
    more = iteration_flops(resolve_auto(changed)) / iteration_flops(resolve_auto(run))
    rows.append(
        (
            "",
            f"{memory(changed).needed_gib:.1f} GiB, {more:.2f} times the operations; {flags(change)}",
        )
    )
    return [*lines_of(rows), f"too large: {size}; the command above fits"]


def _program(run: PlannedRun) -> str:
    if run.world_size > run.hardware.gpus_per_node:
        return "bash run_post_train_multinode.sh"
    return f"NPROC={run.world_size} bash run_post_train.sh"


def command(program: str, words: list[str], change: dict) -> str:
    """Return a command line in which the flags of ``change`` replace those in ``words``."""
    kept = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):  # else a value, which is kept or replaced like its flag
            is_replaced = word.removeprefix("--").partition("=")[0] in change
        if not is_replaced:
            kept.append(word)
    return " ".join(part for part in (program, shlex.join(kept), flags(change)) if part)


def flags(change: dict) -> str:
    """Return settings as flags of a command line."""
    words = []
    for name, value in change.items():
        values = value if isinstance(value, list) else [str(value).lower()]
        words += [f"--{name}", *values]
    return " ".join(words)


def _joined(changes: list[dict]) -> dict:
    """Return the settings of several changes; a larger sp_size replaces a smaller one."""
    joined: dict = {}
    for change in changes:
        for name, value in change.items():
            joined[name] = _added(joined.get(name, []), value)
    return joined


def _added(before: object, value: object) -> object:
    """Return the new value of a setting: a list is added to the one before."""
    if not isinstance(value, list):
        return value
    return [*before, *(each for each in value if each not in before)]


def _fits(run: PlannedRun) -> bool:
    return memory(run).fits(run.hardware.gpu_memory)


def _broken_rules(run: PlannedRun) -> set[str]:
    broken = problem_of(lambda: check(run.config, run.world_size, on_this_machine=False))
    return {*run.problems, *"\n".join(broken).splitlines()}
