"""Confidence interval of a mean over training seeds and prompts, with Student's t, valid for few
seeds.

    values (seeds, prompts), x_ij = mean + seed_i + prompt_j + rest_ij  ->  mean, and 95 % interval

Both seeds and prompts are random samples. With h the half width of the plain t interval over the
seeds' means, over the prompts' means, and over the residual (which contributes to both of them),

    half width^2 = max(h_seeds^2 + h_prompts^2 - h_rest^2, min(h_seeds, h_prompts)^2)

(a modified large-sample interval; Graybill and Wang 1980, Ting et al. 1990). If only one of the two
varies, it is exactly a t interval. In simulations with normal effects, 3 or 5 seeds and 8 or 96
prompts, its coverage is 95 to 97 % if seeds, prompts or the residual account for 95 % of the
variance of the mean, and 94.7 to 98.1 % for any mixture. It is most conservative if prompts account
for seven eighths of the variance and 3 seeds for the rest.

With one seed the interval is over prompts only and does not cover variation between training seeds.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np

CONFIDENCE = 0.95
SHARES = ("_correct", "clipped", "frozen", "diversity")  # ends of the names of metrics from 0 to 1
DISTANCES = ("distance",)  # ends of the names of metrics of at least 0


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; low and high are NaN for a mean of one value."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name, None for NaN."""
        return {
            name: value if math.isfinite(value) else None for name, value in asdict(self).items()
        }


def t_interval(values: np.ndarray) -> Interval:
    """Return the mean over the prompts that every seed has a value for, with its interval; NaN
    without such a prompt.

    Shape of ``values``: (seeds, prompts), NaN for missing values.
    """
    values = values[:, np.isfinite(values).all(0)]
    if not values.size:
        return Interval(math.nan, math.nan, math.nan)
    mean = float(values.mean())
    half_width = float(half_widths(values))
    return Interval(mean, mean - half_width, mean + half_width)


def in_range(interval: Interval, name: str) -> Interval:
    """Return the interval of a mean within the range that the metric of this name can have.

    The t interval of a share is taken on the scale of log(x / (1 - x)), and that of a distance on the
    scale of log(x); the half width there is the half width here times the derivative at the mean
    (delta method). Other metrics, and a mean on the edge of its range, keep their interval.
    """
    mean, half_width = interval.mean, interval.high - interval.mean
    name = name.lower()
    if name.endswith(SHARES) and 0 < mean < 1:
        odds, spread = mean / (1 - mean), math.exp(half_width / (mean * (1 - mean)))
        return Interval(mean, odds / (odds + spread), odds / (odds + 1 / spread))
    if name.endswith(DISTANCES) and mean > 0:
        spread = math.exp(half_width / mean)
        return Interval(mean, mean / spread, mean * spread)
    return interval


def half_widths(values: np.ndarray) -> np.ndarray:
    """Return the half widths of the intervals, NaN for one number.

    Shape: (..., seeds, prompts) -> (...).
    """
    num_seeds, num_prompts = values.shape[-2:]
    if num_seeds == num_prompts == 1:
        return np.full(values.shape[:-2], np.nan)
    centred = values - values.mean((-2, -1), keepdims=True)
    seed_effects = centred.mean(-1, keepdims=True)
    prompt_effects = centred.mean(-2, keepdims=True)
    by_seed = _squared_half_width(seed_effects, num_seeds - 1)
    by_prompt = _squared_half_width(prompt_effects, num_prompts - 1)
    rest = _squared_half_width(
        centred - seed_effects - prompt_effects, (num_seeds - 1) * (num_prompts - 1)
    )
    return np.sqrt(np.maximum(by_seed + by_prompt - rest, np.minimum(by_seed, by_prompt)))


def _squared_half_width(deviations: np.ndarray, degrees_of_freedom: int) -> np.ndarray:
    """Return the squared half width of the t interval of a mean, from deviations; 0 without degrees
    of freedom.
    """
    mean_square = np.square(deviations).mean((-2, -1))
    if not degrees_of_freedom:
        return mean_square
    return mean_square / degrees_of_freedom * t_quantile(degrees_of_freedom) ** 2


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution."""
    from scipy.special import stdtrit  # slow to import, and not needed to start a run

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
