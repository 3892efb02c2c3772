"""The copies of the trained weights, of the size of one of 8 ranks: moving the EMA, and swapping
the anchor in.
"""

import pytest
import torch
from torch import nn

from hyvideo.training.anchor import WeightCopy
from tests.cuda.speed import seconds_of
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
NUM_PARAMETERS, SIZE = (4, 64) if IS_TINY else (1600, 651_000)  # 4.17 GB in float32


@pytest.fixture(scope="module")
def model(gpu):
    return nn.ParameterList([torch.randn(SIZE, device=DEVICE) for _ in range(NUM_PARAMETERS)])


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_copies(model, record, offload):
    kept = WeightCopy(model, dict(model.named_parameters()), offload=offload)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    def swap():
        with kept.swapped_in():
            pass

    record({"GB": 4 * SIZE * NUM_PARAMETERS / 1e9})
    before = kept.tensors()["0"].clone()
    record({"EMA step, s": seconds_of(lambda: kept.move_towards(0.1), DEVICE)})
    record({"swap in and out, s": seconds_of(swap, DEVICE)})
    torch.testing.assert_close(kept.tensors()["0"].cpu(), before.cpu() + 0.1)
