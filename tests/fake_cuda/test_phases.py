"""Peaks of the 24 GB recipe on the fake CUDA device, compared with the plan."""

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import parse
from tests.conftest import ROOT
from tests.fake_cuda.counting import counted as counted_by
from tests.planning.simulated import with_layers


def recipe(kind, **settings):
    """Return the recipe with two blocks, but with the checkpointing of all, and two rollouts,
    computed one by one.
    """
    config = parse(["--config", str(ROOT / "configs/hunyuanvideo15_1gpu_24gb.yaml")]).config
    changes = {
        "base_weight_dtype": kind,
        "activation_checkpointing": "full",
        "batch_size": 2,
    } | settings
    run = PlannedRun(config.with_settings(**changes), 1, released_sizes("480p_t2v"))
    return with_layers(run, 2)


def narrow(kind):
    """Return the recipe with two tiles per video instead of eight."""
    return recipe(kind, width=192)


@pytest.mark.slow
def test_the_plan_is_within_10_percent_of_the_counted_peaks():
    for kind, counted in counted_by("tests.fake_cuda.phases").items():
        phases = memory(recipe(kind)).phases | {"decode": memory(narrow(kind)).phases["decode"]}
        assert phases.keys() - counted.keys() <= {"encode", "decode", "score", "validation"}
        for phase, peak in counted.items():
            planned = (
                sum(size for name, size in phases[phase].items() if name != "trajectories") / GIB
            )
            assert planned == pytest.approx(peak, rel=0.1), (kind, phase)


@pytest.mark.slow
def test_the_plan_of_decoding_with_a_gradient_is_within_10_percent_of_the_counted_peaks():
    names = [
        "hunyuan,33,256,128,128",
        "hunyuan,9,128,128,128",
        "wan,17,240,416,0",
        "wan22,17,256,256,0",
    ]
    architectures = {
        "hunyuan": (released_sizes("480p_t2v"), 2),
        "wan": (released_sizes("wan2.1_t2v_1.3b"), 4),
        "wan22": (released_sizes("wan2.2_ti2v_5b"), 4),
    }
    for name, counted in counted_by("tests.fake_cuda.decode_gradient", *names).items():
        family, frames, height, width, tile = name.split(",")
        architecture, value_bytes = architectures[family]
        size = int(frames), int(height), int(width)
        planned = architecture.decoding.gradient_bytes(1, size, int(tile), value_bytes) / GIB
        assert planned == pytest.approx(counted, rel=0.1), name
