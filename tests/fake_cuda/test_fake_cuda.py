"""Work of a GPU for a rollout and an update, counted on the fake CUDA device."""

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.flops import count_decoding, count_parameters
from tests.fake_cuda.counting import counted as counted_by

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def counted():
    """Counts by part of a run."""
    return counted_by("tests.fake_cuda.checks")


def test_rollout_and_update_request_the_same_outputs_of_cudnn(counted):
    """With torch's own choice of cuDNN, they would not."""
    requested = {kernel: counted["kernels"][kernel]["log-sum-exp"] for kernel in ("cudnn", "torch")}
    assert requested == {"cudnn": [[True], [True]], "torch": [[False], [True]]}


@pytest.mark.parametrize("kernel, passes", [("flash", 3.5), ("cudnn", 3.5), ("torch", 4.5)])
def test_selective_checkpointing_computes_attention_once_with_each_kernel(counted, kernel, passes):
    """Forward 1, backward 2.5, and with full checkpointing, as here with torch's choice, a second
    forward pass.
    """
    forward = counted["block"]["forward"]["teraflop"]["attention"]
    assert counted["kernels"][kernel]["teraflop"] == pytest.approx(passes * forward)


def test_rewards_are_computed_on_the_device_of_the_rank_in_a_stream(counted):
    found = counted["reward thread"]
    assert found["rewards"] == [1.0, 1.0]
    ((thread, device, stream),) = found["operators"]
    assert thread == "worker" and device == 3 and stream != 0
    assert found["after"][1:] == [3, 0] and set(found["contexts"]) == {3}


@pytest.mark.parametrize("part, gathers, reductions", [("sampling", 3, 0), ("training", 6, 3)])
def test_blocks_are_gathered_while_others_are_computed(counted, part, gathers, reductions):
    """Two sharded blocks and the root; only the first gather of a forward or backward pass has
    nothing beside it.
    """
    found = counted["sharded"][part]
    collectives = [(stream, what) for stream, what in found["steps"] if what.startswith("_")]
    assert collectives.count(("all_gather", "_allgather_base_")) == gathers
    assert collectives.count(("reduce_scatter", "_reduce_scatter_base_")) == reductions
    assert not found["waits"]
    assert attentions_beside_gathers(found["steps"]).count(0) == gathers // 3


def attentions_beside_gathers(steps):
    """Return for each all-gather the number of attention calls that can run at the same time."""
    submitted, awaited, before_event, awaited_by, found = 0, 0, {}, [], []
    for stream, what in steps:
        if stream == "default":
            submitted += "attention" in what
            before_event[what.replace("record", "wait for default")] = submitted
            if what.startswith("wait for all_gather "):
                found.append(submitted - awaited_by[len(found)])
        elif stream.startswith("all_gather"):
            awaited = max(awaited, before_event.get(what, 0))
            if what == "_allgather_base_":
                awaited_by.append(awaited)
    return found


def test_sharded_weights_are_copied_once_after_each_gather(counted):
    """The copy of bf16 weights from the gathered buffer reads and writes 2 bytes per parameter."""
    released = count_parameters(released_sizes("480p_t2v"))
    parameters = 2 * released.block + released.root
    for part, copies in (("sampling", 1), ("training", 2)):
        copied = counted["sharded"][part]["gigabytes"]["split_with_sizes_copy"]
        assert copied == pytest.approx(copies * 4 * parameters / 1e9, rel=0.01)


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


@pytest.mark.parametrize("place", ["EMA", "offloaded EMA"])
def test_an_ema_is_updated_on_the_device_without_waiting(counted, place):
    found = counted[place]
    assert found["interpolated"] == found["tensors"] > 0
    assert not found["waits"]


def test_an_offloaded_ema_is_copied_from_and_to_pinned_memory_once(counted):
    assert not counted["EMA"]["copies"]
    found = counted["offloaded EMA"]
    for way in ("to device", "to host"):
        numbers = {kind: number for kind, number in found["copies"].items() if kind.endswith(way)}
        assert sum(numbers.values()) == found["tensors"] and numbers.keys() <= {
            f"pinned {way}",
            f"small {way}",
        }


def test_decoding_waits_once(counted):
    found = counted["decode"]
    assert found["waits"] == {"_local_scalar_dense": 1} and sum(found["copies"].values()) == 1


def test_an_offloaded_vae_is_on_the_device_only_while_it_decodes(counted):
    """The copies come from pinned memory, and decoding waits no more often than with a VAE on the
    device.
    """
    found = counted["offloaded VAE"]
    assert (found["before"], found["inside"], found["after"]) == (["cpu"], ["cuda"], ["cpu"])
    assert found["pipeline"] == "cuda" and found["left"] == 0
    assert {kind for kind in found["copies"] if kind.endswith("to device")} == {
        "pinned to device",
        "small to device",
    }
    assert found["waits"] == counted["decode"]["waits"]


def test_a_tile_stays_within_the_planned_memory(counted):
    """256 x 256 pixels, float16, memory in GiB."""
    found, frames = counted["tile"], 33
    planned = released_sizes("480p_t2v").decoding.bytes(1, (frames, 256, 256), 256, 2) / 2**30
    assert found["peak"] == pytest.approx(planned, rel=0.02)
    flops = count_decoding(released_sizes("480p_t2v")) * frames * 256 * 256
    assert sum(found["teraflop"].values()) == pytest.approx(flops / 1e12, rel=0.02)
