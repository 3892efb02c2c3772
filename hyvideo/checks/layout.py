"""How the rollouts of an iteration are divided among the processes, and why that is not possible."""

import itertools
import re

from hyvideo.settings.config import Config
from hyvideo.settings.problems import Problems
from hyvideo.settings.sections import RolloutSettings


def layout_problems(config: Config, world_size: int, file: str = "") -> Problems:
    """Yield why the rollouts of an iteration cannot be divided among the processes.

    If the file is for another number of processes, or one process cannot hold a group, the message
    says how to start them.
    """
    problems = list(division_problems(config, world_size))
    if not problems:
        return
    number = planned_world_size(config, file)
    is_for_others = world_size == 1 or _gpus_of_name(file)
    if number == world_size or not is_for_others or list(division_problems(config, number)):
        yield from problems
        return
    ways = [f"start it with `torchrun --nproc_per_node={number} post_train.py ...`"]
    if number > 8 and number % 8 == 0:
        ways = [f"start it on {number // 8} nodes of 8 GPUs (docs/reliability.md#several-machines)"]
    replicas = world_size // config.distributed.sp_size
    batch = fitting_batch(config.rollout, replicas, config.objective.updates)
    if batch and not list(division_problems(config.with_settings(batch_size=batch), world_size)):
        ways.append(f"set batch_size {batch}")
    reason = problems[0].partition(";")[0]
    yield (
        f"this run has {_processes(world_size)}, and its settings are for {number} ({reason}): "
        f"{', or '.join(ways)}"
    )


def division_problems(config: Config, world_size: int) -> Problems:
    """Yield why ranks, batches or groups cannot be divided among this number of processes."""
    distributed = config.distributed
    replicas = world_size // distributed.sp_size
    problems = list(rank_problems(world_size, distributed.sp_size, distributed.dp_replicate))
    yield from problems or batch_problems(config.rollout, replicas, config.objective.updates)
    if config.rollout.num_generations < 2 and config.objective.needs_rewards:
        yield (
            "num_generations must be at least 2, because advantages compare the rollouts of a "
            f"group, got {config.rollout.num_generations}; raise num_generations"
        )


def rank_problems(world_size: int, sp_size: int, dp_replicate: int = 1) -> Problems:
    """Yield why this layout of ranks is not possible, and the possible values."""
    if world_size % sp_size:
        start = f"possible values: {_divisors(world_size)}"
        if world_size == 1:
            start = f"start {sp_size} with torchrun --nproc_per_node={sp_size}"
        yield (
            f"sp_size must divide the number of processes ({world_size}), got {sp_size}; {start}"
        )
    elif world_size % (dp_replicate * sp_size):
        yield (
            f"dp_replicate must divide the {world_size // sp_size} data-parallel replicas "
            f"({_processes(world_size)}, sp_size {sp_size}), got {dp_replicate}; possible values: "
            f"{_divisors(world_size // sp_size)}"
        )


def head_problems(sp_size: int, num_heads: int) -> Problems:
    if sp_size > num_heads:
        yield (
            f"sp_size must be at most the {num_heads} attention heads of the transformer, got "
            f"{sp_size}; {_divisors(num_heads)} give every rank the same number of heads"
        )


def _processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def batch_problems(rollout: RolloutSettings, replicas: int, num_updates: int) -> Problems:
    """Yield why the rollouts of an iteration do not form whole groups that are evenly distributed
    over the replicas.
    """
    batch = rollout.batch_size
    group = rollout.num_generations
    fitting = fitting_batch(rollout, replicas, num_updates)
    if (batch * replicas) % group:
        yield (
            f"a batch must consist of whole groups: batch_size {batch} x replicas {replicas} = "
            f"{batch * replicas} is not a multiple of num_generations {group}; use batch_size "
            f"{fitting}, or change num_generations"
        )
    elif batch % group and group % batch:
        yield (
            "batch_size must be a multiple or a divisor of num_generations, so that every replica "
            f"samples whole groups or an equal share of one, got batch_size {batch} and "
            f"num_generations {group}; change one of them"
        )
    else:
        groups = batch * replicas * rollout.gradient_accumulation_steps // group
        if groups % num_updates:
            yield (
                f"num_updates_per_rollout must divide the {groups} groups of an iteration, because "
                f"every update trains equally many whole groups, got {num_updates}; use batch_size "
                f"{fitting}, or one of these num_updates_per_rollout: {_divisors(groups)}"
            )


def fitting_batch(rollout: RolloutSettings, replicas: int, num_updates: int) -> int | None:
    """Return the next larger batch_size with whole, evenly distributed groups and equally many of
    them in each update; None without a replica.
    """
    group = rollout.num_generations
    for batch in itertools.count(rollout.batch_size) if replicas else ():
        is_even = batch % group == 0 or group % batch == 0
        samples = batch * replicas
        groups = samples * rollout.gradient_accumulation_steps // group
        if is_even and samples % group == 0 and groups % num_updates == 0:
            return batch
    return None


def planned_world_size(config: Config, file: str = "") -> int:
    """Return the number of processes that the batches of a run need.

    The number in the name of the file comes first, such as 64 in ``configs/..._64gpu.yaml``; then
    1 and sp_size, and, if the settings are for several processes, 8 and the numbers below it.
    Returns 1 if none of them fits.
    """
    numbers = [*_gpus_of_name(file), 1, config.distributed.sp_size]
    has_part_of_group = config.rollout.batch_size < config.rollout.num_generations
    if has_part_of_group or config.distributed.sp_size > 1 or config.distributed.dp_replicate > 1:
        numbers += [8, *range(2, 8)]
    for number in numbers:
        if not list(division_problems(config, number)):
            return number
    return 1


def _gpus_of_name(file: str) -> list[int]:
    """Return the numbers of GPUs in the name of a file, or in the words of a command line."""
    return [int(number) for number in re.findall(r"([1-9]\d{0,3})gpu", file)]
