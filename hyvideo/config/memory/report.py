"""The planner's report: memory by phase, cost, and one line of advice."""

import shlex
from pathlib import Path

from hyvideo.config.memory import cost
from hyvideo.config.memory.advice import cheapest_change, fastest_change
from hyvideo.config.memory.cost import duration
from hyvideo.config.memory.network import traffic
from hyvideo.config.memory.persistent import cpu_bytes
from hyvideo.config.memory.phases import GIB, Memory, memory, resolve_auto
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.whole_run import length_lines
from hyvideo.data.templates import fill, number


def report(run: PlannedRun, words: list[str]) -> str:
    """Return the report of a run with the flags ``words``; without times if the run is illegal."""
    counted, (line, change) = memory(run), verdict(run)
    return fill(
        Path(__file__).with_name("plan.txt.jinja"),
        run=run,
        cost=cost,
        traffic=traffic,
        recomputation=resolve_auto(run).checkpointing,
        on_cpu={item: size / GIB for item, size in cpu_bytes(run).items()},
        counted=counted,
        items=items_in_gib(counted),
        verdict=line,
        command="" if change is None else training_command(run, words, change),
        fastest="" if run.problems else fastest(run),
        length=[] if run.problems else length_lines(run),
    )


def items_in_gib(counted: Memory) -> dict[str, list[float]]:
    """Return the rows of the table of memory: GiB in each phase, and their sums."""
    names = dict.fromkeys(name for phase in counted.phases.values() for name in phase)
    items = {name: [phase.get(name, 0.0) / GIB for phase in counted.phases.values()] for name in names}
    return items | {"sum": [counted.total(phase) / GIB for phase in counted.phases]}


def training_command(run: PlannedRun, words: list[str], change: dict) -> str:
    """Return the command of a run with the flags ``words`` and a change; a timed run also saves every hour."""
    many = run.world_size > run.hardware.gpus_per_node
    launcher = "run_post_train_multinode.sh" if many else "run_post_train.sh"
    hourly = {"save_minutes": 60} if run.is_timed and not run.settings.save_minutes else {}
    return command(f"{'' if many else f'NPROC={run.world_size} '}bash {launcher}", words, change | hourly)


def command(program: str, words: list[str], change: dict) -> str:
    """Return a command line in which the flags of ``change`` replace those in ``words``."""
    kept, is_replaced = [], False
    for word in words:
        is_replaced = word.removeprefix("--").partition("=")[0] in change if word.startswith("--") else is_replaced
        kept += [] if is_replaced else [word]
    return " ".join(part for part in (program, shlex.join(kept), flags(change)) if part)


def fastest(run: PlannedRun) -> str:
    """Return the fastest change with its seconds and GiB; empty if nothing fits."""
    if (change := fastest_change(run)) is None:
        return ""
    best = run.with_settings(**change)
    return f"{flags(change) or 'no change'}: {number(duration(best).total)} s, {memory(best).needed_gib:.1f} GiB"


def flags(change: dict) -> str:
    """Return settings as flags of a command line."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in change.items())


def verdict(run: PlannedRun) -> tuple[str, dict | None]:
    """Return a line on whether the run fits and what to change, and the change: empty if it fits, None if unknown."""
    gpu_memory = run.hardware.gpu_memory
    if run.problems:
        return f"illegal: {run.problems[0]}", None
    needed = memory(run)
    size = f"{needed.needed_gib:.1f} of {gpu_memory:g} GiB, including CUDA context and fragmentation"
    if needed.fits(gpu_memory):
        return f"fits: {size}", {}
    change = cheapest_change(run)
    if change is None:
        return f"too large: {size}; no known change makes it fit; use more GPUs or smaller videos", None
    after = memory(run.with_settings(**change)).needed_gib
    return f"too large: {size}; the cheapest change that makes it fit: {flags(change)} ({after:.1f} GiB)", change
