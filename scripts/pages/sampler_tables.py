"""The tables of docs/sde.md, computed from the samplers."""

import itertools
import math
from collections import defaultdict

from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAMPLERS, Transition, schedule, shifted_levels
from scripts.pages.marginals import ETAS, TWO_PEAKS, interior_error
from scripts.pages.markdown import markdown_table

NUM_STEPS, SHIFT, ETA = 20, 5.0, 0.5
LEVELS = shifted_levels(NUM_STEPS, SHIFT)
SHOWN = (1, 2, 5, 10, 15, 19, 20)  # steps of the first table
TRIED_ETAS = (0.1, 0.25, 0.5, 0.7, 0.9, 1.2)  # from well below to well above published recipes


def schedules() -> dict[str, Schedule]:
    """Return the schedule of each sampler that the page shows."""
    return {
        name: Schedule.build(name, num_steps=NUM_STEPS, shift=SHIFT, eta=ETA) for name in SAMPLERS
    }


def noise_table() -> str:
    """Return the standard deviation of some steps: 0 at deterministic steps."""
    rows = [
        [str(number), f"{LEVELS[number - 1]:.4f}"]
        + [f"{made.transitions[number - 1].std:.4f}" for made in schedules().values()]
        for number in SHOWN
    ]
    return markdown_table(["step", "sigma", *SAMPLERS], rows)


def equalizer_table() -> str:
    """Return the equalizer's weights of the first and the last step with noise."""
    weights = [
        [weight for weight in made.equalizer_weights.tolist() if weight > 0]
        for made in schedules().values()
    ]
    rows = [
        ["first", *(f"{of_steps[0]:.4g}" for of_steps in weights)],
        ["last", *(f"{of_steps[-1]:.4g}" for of_steps in weights)],
    ]
    return markdown_table(["step", *SAMPLERS], rows)


def kl_factor(step: Transition, std: float) -> float:
    """Return the factor between a squared difference of velocities and the KL of a step."""
    return step.b**2 / (2 * std**2)


def kl_table() -> str:
    """Return the factor of the KL at the first steps, at the middle, and at the last with noise."""
    rows = []
    for number in (1, 5, 10, 15, 19):
        steps = [made.transitions[number - 1] for made in schedules().values()]
        cells = [f"{kl_factor(step, step.kl_std or step.std):.2g}" for step in steps]
        rows.append([str(number), f"{LEVELS[number - 1]:.4f}", *cells])
    last = [
        made.transitions[-1] if made.transitions[-1].is_stochastic else None
        for made in schedules().values()
    ]
    cells = [f"{kl_factor(step, step.std):.2g}" if step else "none" for step in last]
    rows.append([str(NUM_STEPS), f"{LEVELS[-2]:.4f}", *cells])
    return markdown_table(["step", "sigma", *SAMPLERS], rows)


def unusual_table() -> str:
    """Return the deterministic steps of each sampler, and the etas with a std above 1, by the
    number of steps.
    """
    rows = []
    for sde_type, sampler in SAMPLERS.items():
        deterministic, exploding = defaultdict(list), defaultdict(list)
        for num_steps, eta in itertools.product(range(4, 201), TRIED_ETAS):
            if eta <= sampler.max_eta:
                stds = [
                    step.std
                    for step in schedule(
                        sde_type, shifted_levels(num_steps, SHIFT), eta, "stochastic"
                    )
                ]
                for place in (place for place, std in enumerate(stds, start=1) if std == 0):
                    deterministic["last" if place == num_steps else f"step {place}"].append(
                        num_steps
                    )
                if max(stds) > 1:
                    exploding[f"eta {eta:g}"].append(num_steps)
        cells = [
            [f"{place}: {min(n)}-{max(n)}" for place, n in found.items()]
            for found in (deterministic, exploding)
        ]
        rows.append([sde_type, *("; ".join(cell) or "none" for cell in cells)])
    return markdown_table(["SDE", "deterministic", "std > 1"], rows)


def equal_noise_table() -> str:
    """Return the variance of each sampler, and its eta for the variance of sage_grpo."""
    rows, target = [], f"sage_grpo:{ETA}"
    for name in SAMPLERS:
        variance = sum(step.std**2 for step in schedule(name, LEVELS, ETA, "stochastic"))
        eta = matched_eta(target, name, num_steps=NUM_STEPS, shift=SHIFT, last_step="stochastic")
        rows.append([name, f"{variance:.4f}", f"{eta:.4f}"])
    return markdown_table(
        ["SDE", f"variance at eta {ETA}", "eta for the variance of sage_grpo"], rows
    )


def marginals_table() -> str:
    """Return the marginal error of two peaks by the number of even steps from 0.95 to 0.2. Takes
    several seconds.
    """
    rows = []
    for sde_type in SAMPLERS:
        for label, eta in ETAS[sde_type].items():
            errors = [interior_error(sde_type, steps, eta, TWO_PEAKS) for steps in (16, 32, 64)]
            rates = [f"{math.log2(error / half):.2f}" for error, half in zip(errors, errors[1:])]
            cells = [f"{error:.4f}" for error in errors]
            rows.append([f"{sde_type}, {label}", *cells, ", ".join(rates)])
    return markdown_table(["SDE", "16 steps", "32 steps", "64 steps", "rate"], rows)


PARTS = {
    "noise of the steps": noise_table,
    "equalizer weights": equalizer_table,
    "KL factors": kl_table,
    "marginals": marginals_table,
    "unusual steps": unusual_table,
    "equal noise": equal_noise_table,
}
