"""Planned memory of a model of two experts."""

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.flops import count_parameters
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.persistent import frozen_bytes, partner_bytes, pinned_bytes, trained_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config

BF16, FP8 = 26.61, 13.54  # GiB of an expert


@pytest.fixture(scope="module")
def run():
    config = load_config("configs/wan22_a14b_1gpu_24gb.yaml")
    return PlannedRun(config, 1, released_sizes(config.model.transformer_version))


@pytest.mark.parametrize(
    "version, parameters",
    [("wan2.2_t2v_a14b", 14_288_491_584), ("wan2.2_i2v_a14b_4step", 14_288_901_184)],
)
def test_an_expert_has_the_parameters_of_the_released_one(version, parameters):
    assert count_parameters(released_sizes(version)).total == parameters


def on_gpu(run):
    """Return the bytes of the partner while it predicts."""
    return partner_bytes(run, is_used=True)


def without(run, part):
    assert part in run.settings.offload
    return run.with_settings(offload=[each for each in run.settings.offload if each != part])


def test_the_partner_is_counted_where_it_is(run):
    resident = without(run, "partner")
    assert on_gpu(resident) / GIB == pytest.approx(FP8, abs=0.01)
    whole = resident.with_settings(partner_weight_dtype="bf16")
    assert on_gpu(whole) / GIB == pytest.approx(BF16, abs=0.01)
    assert on_gpu(run) < on_gpu(resident) / 10 and partner_bytes(run, is_used=False) == 0
    assert pinned_bytes(run)["partner"] == on_gpu(resident)
    single = run.with_settings(transformer_version="wan2.1_t2v_14b")
    assert on_gpu(single) == 0 and frozen_bytes(single) == frozen_bytes(run)


def test_a_partner_is_sharded_like_the_policy():
    config = load_config("configs/wan22_a14b_8gpu.yaml")
    run = PlannedRun(config, 8, released_sizes(config.model.transformer_version))
    assert on_gpu(run) / GIB == pytest.approx(BF16 / 8, abs=0.01)


def test_the_policy_is_away_while_scorers_work(run):
    resident = without(run, "policy")
    away, beside = memory(run).phases["score"], memory(resident).phases["score"]
    assert away["parameters"] == trained_bytes(run)
    assert beside["parameters"] - away["parameters"] == frozen_bytes(run)
    assert memory(resident).peak_phase() == "score" and memory(run).peak_phase() != "score"
