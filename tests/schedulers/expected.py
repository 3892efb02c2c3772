"""Expected properties of the built-in samplers, one row of `EXPECTED` each."""

from collections.abc import Callable
from dataclasses import dataclass

from hyvideo.schedulers.transitions import SAGE_SIGMA_MAX, SAMPLERS


@dataclass(frozen=True)
class Expected:
    """Closed forms and limits of one sampler."""

    stds: tuple[float, float, float, float]
    """Standard deviations of steps 1, 2, 11 and 20 of 20 at shift 5 and eta 0.5, four digits."""
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
        "tests/schedulers/expected.py, and write docs/sde.md with python -m scripts.pages"
    )
    return EXPECTED[sde_type]
