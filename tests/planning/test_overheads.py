"""Seconds of an iteration outside of sampling and training, in closed form."""

from pathlib import Path

import pytest

from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.cost import Pass, duration
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.overheads import (
    anchor_seconds,
    ema_seconds,
    muon_parameters,
    optimizer_seconds,
)
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "hunyuanvideo15_480p_8gpu_nft.yaml"
MODEL = Architecture()
SHARE = 4 * MODEL.parameters / 8  # bytes of the trained weights on one of eight ranks
COPIES = Hardware(pcie=20.0)


def planned(world_size=8, hardware=COPIES, **changes):
    changes = {"gate_interval": 0, "reference_mode_offload": False} | changes
    return PlannedRun(load_config(CONFIG, **changes), world_size, MODEL, hardware=hardware)


def test_adamw_reads_four_tensors_and_writes_three_and_the_gradients_are_clipped():
    assert optimizer_seconds(planned()) == pytest.approx(10 * SHARE / 2.6e12)
    assert optimizer_seconds(planned(lora_rank=32)) < 0.02 * optimizer_seconds(planned())


def test_muon_orthogonalizes_all_matrices_on_every_rank():
    run = planned(use_muon=True)
    assert muon_parameters(run) == MODEL.matrix_parameters
    assert muon_parameters(planned(use_muon=True, muon_scope="all")) == MODEL.parameters
    assert muon_parameters(planned(use_muon=True, lora_rank=32)) == muon_parameters(planned()) == 0
    one, eight = (optimizer_seconds(planned(world_size=n, use_muon=True)) for n in (1, 8))
    products = 5 * 5 * 2048 * MODEL.matrix_parameters / 580e12
    assert one > products and eight > products + 4 * MODEL.matrix_parameters * 7 / 8 / 300e9
    # of a square matrix: square, its square, and the product with the matrix, in each of five steps
    assert products < 5 * 6 * 2048 * MODEL.matrix_parameters / 580e12


def test_an_offloaded_ema_comes_to_the_gpu_and_goes_back_after_each_update():
    assert ema_seconds(planned()) == 0
    resident, offloaded = (
        planned(ema_decay=0.9, reference_mode_offload=value) for value in (False, True)
    )
    assert ema_seconds(resident) == pytest.approx(8 * SHARE / 2.6e12)
    assert ema_seconds(offloaded) - ema_seconds(resident) == pytest.approx(2 * SHARE / 20e9)
    assert duration(offloaded).overheads["EMA"] == 2 * ema_seconds(offloaded)  # two updates


def test_an_offloaded_anchor_crosses_pcie_four_times_in_an_iteration():
    """It swaps places with the policy before its forward passes and after them."""
    assert anchor_seconds(planned(reference_mode_offload=True)) == pytest.approx(4 * SHARE / 20e9)
    assert anchor_seconds(planned()) == pytest.approx(12 * SHARE / 2.6e12)
    assert anchor_seconds(planned(kl_strategy="none", kl_weight=0.0)) == 0


@pytest.mark.parametrize("interval, forwards", [(0, 0.0), (1, 2.0), (10, 0.2)])
def test_the_check_of_nft_costs_two_forward_passes_in_one_of_its_intervals(interval, forwards):
    run = planned(gate_interval=interval)
    assert run.rollouts_per_replica * run.checked_forwards == pytest.approx(forwards)
    added = duration(run).stages["update"] - duration(planned()).stages["update"]
    assert added == pytest.approx(forwards * Pass().seconds(run))
    assert planned(objective="grpo", eta=0.5, gate_interval=1).checked_forwards == 0


def test_the_overheads_are_parts_of_the_stages():
    run = planned(reference_mode_offload=True, ema_decay=0.9, gate_interval=1)
    bare = planned(hardware=Hardware(pcie=1e9), kl_strategy="none", kl_weight=0.0)
    assert sum(duration(run).overheads.values()) > 1
    assert set(duration(run).stages) == set(duration(bare).stages)


@pytest.mark.parametrize(
    "name", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "nvidia-rtx-4090"]
)
def test_a_gpu_is_known_by_its_short_name_and_by_its_name_in_torch(name):
    found = hardware_of(name)
    assert (found.gpu_memory, found.rate, found.memory_rate, found.pcie) == (23.6, 125.0, 0.9, 22.0)
    assert found.name == "RTX 4090"


def test_an_unknown_gpu_is_an_error_with_the_known_ones():
    with pytest.raises(
        ValueError,
        match="gpu must be one of H100, .*RTX 3090, got 'RTX 4090 Laptop GPU'; for another",
    ):
        hardware_of("RTX 4090 Laptop GPU")


def test_without_a_name_the_memory_is_as_fast_as_the_rate_of_products():
    assert Hardware().memory_rate == 2.6 and Hardware(rate=290.0).memory_rate == 1.3
    assert Hardware().name == "H100" and Hardware(rate=290.0).name == ""
    assert Hardware(rate=290.0, bandwidth=2.0).seconds("memory", 4e12) == 2.0
