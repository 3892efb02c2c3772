"""Closed forms of the figures that need no run, and measured norms beside them."""

import json

import pytest
from matplotlib.axes import Axes

from examples import sampler_figures
from examples.sampler_figures import PAPER, steps_of

plot = Axes.plot


def test_the_gradient_scale_of_sage_matches_the_paper():
    first, *_, last = steps_of("sage_grpo", **PAPER)
    assert first["theory"] == pytest.approx(0.0188, abs=1e-4) and last["theory"] == pytest.approx(
        2.77, abs=0.01
    )
    assert first["inverse_std"] == pytest.approx(1 / 0.5555, abs=1e-3)
    assert len(steps_of("cps", **PAPER)) == 19  # the last step has no noise


def test_measured_norms_are_drawn_beside_the_theory(monkeypatch, tmp_path, capsys):
    drawn = []
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda axes, x, y, *rest, **more: drawn.append([*y]) or plot(axes, x, y, *rest, **more),
    )
    steps = [
        {
            "sigma": 1 - i / 4,
            "theory": 2.0**i,
            "norm": 3 * 2.0**i,
            "norm_weighted": 3.0,
            "inverse_std": 2.0**i,
        }
        for i in range(4)
    ]
    content = {
        "sde_type": "sage_grpo",
        "num_steps": 5,
        "shift": 3.0,
        "eta": 0.7,
        "last_step": "deterministic",
    }
    path = tmp_path / "gradients.json"
    path.write_text(json.dumps(content | {"steps": steps}))
    arguments = ["--gradients", str(path), "--output_dir", str(tmp_path / "f")]
    sampler_figures.main(arguments)
    assert {file.name for file in (tmp_path / "f").iterdir()} == {"figure4.png", "figure9.png"}
    assert [1.0, 2.0, 4.0, 8.0] in drawn, "measured norms, scaled to agree with the theory midway"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        sampler_figures.main(arguments)
    assert "--gradients" in capsys.readouterr().err
