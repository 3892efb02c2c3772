"""Expected properties of the built-in samplers, one row of `EXPECTED` each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hyvideo.schedulers.transitions import SAGE_SIGMA_MAX, SAMPLERS


def eta_1(width: float) -> float:
    return 1.0


def falling_eta(width: float) -> float:
    """Return the eta at which cps replaces a share ``sin^2(eta pi / 2) = width`` of the predicted
    noise.

    Then ``std^2 = sigma'^2 width`` and the mean is the Euler step plus ``sigma^2 width / 2`` times
    the score, to first order in the width: cps is the marginal-preserving SDE with diffusion
    coefficient ``sigma``. At a fixed eta, the share of the predicted noise that is replaced by
    fresh noise does not shrink with the step. Only the predicted noise depends on the predicted
    data, so the error of the replacement does not shrink either.
    """
    return 2 / math.pi * math.asin(math.sqrt(width))


@dataclass(frozen=True)
class Expected:
    """Closed forms and limits of one sampler."""

    stds: tuple[float, float, float, float]
    """Standard deviations of steps 1, 2, 11 and 20 of 20 at shift 5 and eta 0.5, four digits."""
    marginals: dict[str, Callable[[float], float]] = field(default_factory=lambda: {"eta 1": eta_1})
    """Label in docs/sde.md -> eta as a function of the step width; the last one keeps the marginals to first order."""
    deterministic: Callable[[tuple[float, ...]], list[int]] = lambda levels: []
    """Function from the levels of a schedule to the steps without noise."""


EXPECTED = {
    "sage_grpo": Expected(
        stds=(0.5555, 0.4256, 0.1834, 0.0795),
        deterministic=lambda levels: [
            i for i, below in enumerate(levels[1:]) if below >= SAGE_SIGMA_MAX
        ],
    ),
    "flow_grpo": Expected(stds=(0.5000, 0.5186, 0.1929, 0.1171)),
    "dance_grpo": Expected(stds=(0.0510, 0.0532, 0.0863, 0.2282)),
    "cps": Expected(
        stds=(0.6997, 0.6917, 0.5682, 0.0),
        marginals={"eta 0.5": lambda width: 0.5, "eta falling": falling_eta},
        deterministic=lambda levels: [len(levels) - 2],
    ),
    "precise": Expected(
        stds=(0.5131, 0.4038, 0.1778, 0.0000),
        deterministic=lambda levels: [
            i for i, below in enumerate(levels[1:]) if below >= SAGE_SIGMA_MAX or below == 0
        ],
    ),
    "dance_precise": Expected(
        stds=(0.0507, 0.0529, 0.0845, 0.0000), deterministic=lambda levels: [len(levels) - 2]
    ),
    "anchored": Expected(
        stds=(0.9895, 0.9780, 0.7927, 0.0000),
        marginals={"eta falling": lambda width: width},
        deterministic=lambda levels: [len(levels) - 2],
    ),
}


def expected_of(sde_type: str) -> Expected:
    """Return the row of a built-in sampler. Fails with instructions if there is none."""
    assert sde_type in SAMPLERS, (
        f"{sde_type} has a row in EXPECTED ({__file__}) but not in SAMPLERS"
    )
    assert sde_type in EXPECTED, (
        f"SAMPLERS in hyvideo/schedulers/transitions.py has {sde_type}: add its row to EXPECTED in "
        "tests/schedulers/expected.py, then regenerate the tables of docs/sde.md "
        "(docs/extend.md)"
    )
    return EXPECTED[sde_type]
