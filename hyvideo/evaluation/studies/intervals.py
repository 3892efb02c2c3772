"""Interval of a mean over training seeds and prompts, by Student's t: honest for few seeds.

    values (seeds, prompts), x_ij = mean + seed_i + prompt_j + rest_ij  ->  mean, and 95 % interval

Seeds and prompts are drawn both: another study would have others. With h the half width of the plain t interval over
the seeds' means, over the prompts' means, and over the rest (what neither explains, in both of the first two),

    half width^2 = max(h_seeds^2 + h_prompts^2 - h_rest^2, min(h_seeds, h_prompts)^2)

(a modified large-sample interval; Graybill and Wang 1980, Ting et al. 1990). It is exactly a t interval where only one
of the two varies. With normal effects, 3 or 5 seeds and 8 or 96 prompts it covers 95 to 97 % where seeds, prompts or
the rest make 95 % of the variance of the mean, and 94.7 to 98.1 % at any mixture of them (simulated): where it is off,
it is too wide, most of all where prompts make seven eighths of the variance and 3 seeds the rest.

With one seed the interval is over prompts alone, and says nothing of other seeds.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the range that belongs to it; a mean of one value has none, and NaN for low and high."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def as_json(self) -> dict[str, float | None]:
        """The numbers by name, None for NaN."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def t_interval(values: np.ndarray) -> Interval:
    """The mean over the prompts that have a value of every seed, and its 95 % interval; all NaN without such a prompt.

    ``values`` are one number for each training seed and prompt, NaN where it is missing. Shape: (seeds, prompts).
    """
    values = values[:, np.isfinite(values).all(0)]
    if not values.size:
        return Interval(math.nan, math.nan, math.nan)
    mean, half_width = float(values.mean()), float(half_widths(values))
    return Interval(mean, mean - half_width, mean + half_width)


def half_widths(values: np.ndarray) -> np.ndarray:
    """Half widths of the intervals of whole tables, NaN of one number. Shape: (..., seeds, prompts) -> (...)."""
    num_seeds, num_prompts = values.shape[-2:]
    if num_seeds == num_prompts == 1:
        return np.full(values.shape[:-2], np.nan)
    centred = values - values.mean((-2, -1), keepdims=True)
    of_seeds, of_prompts = centred.mean(-1, keepdims=True), centred.mean(-2, keepdims=True)
    by_seed = _squared_half_width(of_seeds, num_seeds - 1)
    by_prompt = _squared_half_width(of_prompts, num_prompts - 1)
    rest = _squared_half_width(centred - of_seeds - of_prompts, (num_seeds - 1) * (num_prompts - 1))
    return np.sqrt(np.maximum(by_seed + by_prompt - rest, np.minimum(by_seed, by_prompt)))


def _squared_half_width(deviations: np.ndarray, degrees_of_freedom: int) -> np.ndarray:
    """Half width, squared, of the t interval of the mean of what deviates so; 0 for what cannot vary."""
    mean_square = np.square(deviations).mean((-2, -1))
    return mean_square / degrees_of_freedom * t_quantile(degrees_of_freedom) ** 2 if degrees_of_freedom else mean_square


def t_quantile(degrees_of_freedom: int) -> float:
    """Bound that a variable with Student's t distribution stays within, in size, in 95 of 100 cases."""
    from scipy.special import stdtrit  # takes a while, and a run that starts needs none of it

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
