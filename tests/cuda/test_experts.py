"""Blocks of the width of Wan2.2 A14B in fp8: streamed from the CPU as the frozen partner of a policy,
and away from the GPU as a policy while the scorer works. Both give the same numbers.
"""

import pytest
import torch

from hyvideo.models.family import family_named, prepare
from hyvideo.models.fp8 import Fp8Linear, store_all, use_fp8
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.models.offload import come_back, leave, on_device, put
from hyvideo.models.placement import Placement
from tests.cuda.full_width import A14B_TRANSFORMER
from tests.cuda.recipes import recipe
from tests.cuda.speed import Workload, forward, peak_gib, sample, seconds_of, train
from tests.cuda.workload import DEVICE, IS_TINY, TINY_WAN, arrange

pytestmark = pytest.mark.cuda
SIZES = TINY_WAN | {"num_layers": 3} if IS_TINY else A14B_TRANSFORMER | {"num_layers": 5}
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def workload(device, name):
    """Return the size of a recipe's videos, with few blocks."""
    each = recipe(name)
    grid = (2, 4, 4) if IS_TINY else each.grid(each.config.sampling.size)
    return Workload(device, sizes=SIZES, grid=grid, family=family_named("wan"))


@COMPILED
@pytest.mark.parametrize("name", ["wan22_a14b_1gpu_24gb", "wan22_a14b_1gpu_48gb"])
def test_streamed_blocks(gpu, record, name, compiled):
    """Records the seconds of a forward pass with the blocks on the GPU and with their copies."""
    work = workload(gpu, name)
    model = work.transformer().requires_grad_(False)
    prepare(model, {"text"})
    store_all(model, DEVICE)
    arrange(model, recompute="none", compile=compiled, is_hooked=True)
    inputs = work.inputs(model)["ours"]
    expected = sample(model, inputs)
    record({"on the GPU, s": seconds_of(lambda: sample(model, inputs), DEVICE)})
    put(model, Placement.BLOCKS, DEVICE)
    found = []

    def stream():
        found.append(sample(model, inputs))

    for turn in ("once", "twice"):
        with on_device(model):
            stream()
            record({f"streamed {turn}, s": seconds_of(stream, DEVICE)})
            record({f"peak GiB, {turn}": peak_gib(stream, DEVICE)})
    assert expected.isfinite().all() and expected.abs().max() > 0
    assert all(torch.equal(each, expected) for each in found)


@COMPILED
def test_frozen_weights_leave_and_come_back(gpu, record, compiled):
    """Records what they leave on the GPU, the seconds of their return, and those of training before
    and after it.
    """
    work = workload(gpu, "wan22_a14b_1gpu_24gb")
    model = work.transformer()
    prepare(model, {"text"})
    use_fp8(model)
    add_trainable_lora(model, training_config(model, rank=16, alpha=32.0))
    for module in model.modules():  # after the adapter, as in a run
        if isinstance(module, Fp8Linear):
            module.store(module.weight.detach())
    arrange(model, recompute="full", compile=compiled)
    inputs = work.inputs(model)["ours"]
    sampled = sample(model, inputs)
    assert torch.equal(sampled, forward(model, inputs).detach())
    train(model, inputs)
    record({"training, s": seconds_of(lambda: train(model, inputs), DEVICE)})
    record({"GiB on the GPU": allocated_gib()})
    put(model, Placement.CPU, DEVICE)
    for turn in ("once", "twice"):
        record({f"GiB left, {turn}": allocated_gib()})
        record({f"return {turn}, s": seconds_of(lambda: come_back(model), DEVICE)})
        assert torch.equal(sample(model, inputs), sampled)
        leave(model)
    come_back(model)
    record({"training again, s": seconds_of(lambda: train(model, inputs), DEVICE)})
    assert torch.equal(sample(model, inputs), sampled)


def allocated_gib():
    return torch.cuda.memory_allocated(DEVICE) / 2**30 if DEVICE.type == "cuda" else 0.0
