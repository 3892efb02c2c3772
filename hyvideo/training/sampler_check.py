"""Check that a custom sampler has the same steps on all ranks, and in a resumed run."""

import math
from collections.abc import Sequence

from hyvideo.distributed.collectives import agree
from hyvideo.distributed.mesh import Mesh
from hyvideo.settings.iteration_plan import transitions
from hyvideo.settings.sections import RolloutSettings

Coefficients = list[list[float]]  # a, b and std of each step


def custom_steps(rollout: RolloutSettings, mesh: Mesh) -> Coefficients:
    """Return the steps of a custom sampler; empty for a built-in one.

    Raises ValueError on all ranks if they differ between ranks, such as of a function that reads
    the rank. Collective.
    """
    if ".py:" not in rollout.sde_type:
        return []
    steps = [[float(step.a), float(step.b), float(step.std)] for step in transitions(rollout)]
    numbered = dict(enumerate(steps, 1))
    agree(f"(a, b, std) of sde_type {rollout.sde_type} in step", numbered, mesh)
    return steps


def check_resumed_steps(rollout: RolloutSettings, saved: Coefficients, now: Coefficients) -> None:
    """Raise ValueError if a custom sampler returns other steps than at the start of the run with
    the same settings.
    """
    is_same = len(saved) == len(now) and all(
        math.isclose(before, after, rel_tol=1e-9)
        for pair in zip(saved, now)
        for before, after in zip(*pair)
    )
    if not is_same:
        difference = _difference(rollout.sde_type, saved, now)
        raise ValueError(
            f"{difference} in the checkpoint and now; the arguments alone must decide them"
        )


def _difference(
    sde_type: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> str:
    number = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), 0)
    values = " and ".join(
        str([float(f"{x:.6g}") for x in steps[number]]) for steps in (first, second)
    )
    return (
        f"sde_type {sde_type} returns different values for step {number + 1}, (a, b, std) = "
        f"{values},"
    )
