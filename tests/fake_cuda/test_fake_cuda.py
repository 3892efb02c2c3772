"""Work of a GPU for a rollout and an update, counted on the fake CUDA device."""

import pytest

from hyvideo.models.hunyuan_video15.sizes import Architecture
from tests.fake_cuda.counting import counted as counted_by


@pytest.fixture(scope="module")
def counted():
    """Counts by part of a run."""
    return counted_by("tests.fake_cuda.checks")


def test_the_device_detects_wrong_devices_transfers_and_waits(counted):
    device = counted["device"]
    assert "cuda:0 and cpu" in device["wrong device"]
    assert device["waits"] == {"_local_scalar_dense": 1, "copy to device": 1, "copy to host": 1}
    assert device["copies"] == {"pageable to device": 2, "pinned to device": 1, "small to host": 1}


def test_rollout_and_update_request_the_same_outputs_of_cudnn(counted):
    assert counted["cudnn"] == [True, True, True]


@pytest.mark.parametrize("part", ["rollout step", "replay", "backward", "optimizer step"])
def test_passes_have_no_waits_and_no_transfers(counted, part):
    found = counted["passes"][part]
    assert not found["waits"] and not found["copies"]


def test_an_update_waits_once_for_the_gradient_norm(counted):
    assert counted["passes"]["norm"]["waits"] == {"_local_scalar_dense": 1}


def test_an_anchor_on_the_device_is_swapped_without_waiting(counted):
    found = counted["exchange"]
    assert not found["waits"] and not found["copies"]


def test_an_offloaded_anchor_is_copied_from_pinned_memory_without_waiting(counted):
    found = counted["offloaded exchange"]
    assert {kind.split()[0] for kind in found["copies"]} == {"pinned", "small"}
    assert not found["waits"]


def test_decoding_waits_once(counted):
    found = counted["decode"]
    assert found["waits"] == {"_local_scalar_dense": 1} and sum(found["copies"].values()) == 1


def test_an_offloaded_vae_is_on_the_device_only_while_it_decodes(counted):
    """The copies come from pinned memory, and decoding waits no more often than with a VAE on the device."""
    found = counted["offloaded VAE"]
    assert (found["before"], found["inside"], found["after"]) == (["cpu"], ["cuda"], ["cpu"])
    assert found["pipeline"] == "cuda" and found["left"] == 0
    assert {kind for kind in found["copies"] if kind.endswith("to device")} == {"pinned to device", "small to device"}
    assert found["waits"] == counted["decode"]["waits"]


@pytest.mark.parametrize("frames, gigabytes, peak", [(81, 154, 4.5), (121, 229, 6.8)])
def test_a_tile_stays_within_its_traffic_and_the_planned_memory(counted, frames, gigabytes, peak):
    """256 x 256 pixels, float16; traffic in GB, convolutions included, memory in GiB."""
    found = counted["tiles"][str(frames)]
    planned = Architecture().decoding_bytes(1, (frames, 256, 256), 256, 2) / 2**30
    assert found["gigabytes"] <= gigabytes and found["peak"] <= peak
    assert found["peak"] == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(
    "block, part, gigabytes, peak",
    [
        ("block", "forward", 6.0, 1.4),
        ("block", "forward with gradient", 6.0, 2.8),
        ("block", "backward", 11.5, 3.3),
        ("LoRA block", "forward", 12.3, 1.9),
        ("LoRA block", "forward with gradient", 12.3, 3.1),
        ("LoRA block", "backward", 14.9, 3.5),
    ],
)
def test_a_block_stays_within_its_traffic_and_memory(counted, block, part, gigabytes, peak):
    """480 x 864, 81 frames, eager: traffic of the memory-bound operators in GB, memory in GiB."""
    assert counted[block][part]["gigabytes"] <= gigabytes
    assert counted[block][part]["peak"] <= peak
