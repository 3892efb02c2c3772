"""Peaks of the 24 GB recipe on the fake CUDA device, compared with the plan."""

import pytest

from hyvideo.config.command_line import parse
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.phases import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from tests.conftest import ROOT
from tests.fake_cuda.counting import counted as counted_by


def recipe(kind, **settings):
    """Return the recipe with two blocks, but with the checkpointing of all, and two rollouts, computed one by one."""
    config = parse(["--config", str(ROOT / "configs/hunyuanvideo15_1gpu_24gb.yaml")]).config
    changes = {"base_weight_dtype": kind, "activation_checkpointing": "full", "batch_size": 2} | settings
    return PlannedRun(config.with_settings(**changes), 1, Architecture(num_layers=2))


def narrow(kind):
    """Return the recipe with two tiles per video instead of eight."""
    return recipe(kind, width=192)


def test_the_plan_is_within_10_percent_of_the_counted_peaks():
    for kind, counted in counted_by("tests.fake_cuda.phases").items():
        phases = memory(recipe(kind)).phases | {"decode": memory(narrow(kind)).phases["decode"]}
        assert phases.keys() - counted.keys() <= {"encode", "decode", "score", "validation"}
        for phase, peak in counted.items():
            planned = sum(size for name, size in phases[phase].items() if name != "trajectories") / GIB
            assert planned == pytest.approx(peak, rel=0.1), (kind, phase)
