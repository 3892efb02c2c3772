"""Closed forms of the figures that need no run, and measured norms beside them."""

import pytest
from matplotlib.axes import Axes

from examples.sampler_figures import PAPER, steps_of

plot = Axes.plot


def test_the_gradient_scale_of_sage_matches_the_paper():
    first, *_, last = steps_of("sage_grpo", **PAPER)
    assert first["theory"] == pytest.approx(0.0188, abs=1e-4) and last["theory"] == pytest.approx(
        2.77, abs=0.01
    )
    assert first["inverse_std"] == pytest.approx(1 / 0.5555, abs=1e-3)
    assert len(steps_of("cps", **PAPER)) == 19  # the last step has no noise
