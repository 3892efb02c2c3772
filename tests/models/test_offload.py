"""Offloading of frozen modules. tests/fake_cuda checks the copies between a CPU and a GPU,
tests/cuda the videos.
"""

import copy

import pytest
import torch

from hyvideo.models.fp8 import Fp8Linear
from hyvideo.models.loading import load_vae
from hyvideo.models.offload import FrozenWeights, device_of, on_device
from tests.forked import ROOT

CPU = torch.device("cpu")


class OnMeta(FrozenWeights):
    """Weights that are away on the meta device, which cannot compute."""

    def leave(self):
        for module, name in self._places:
            weight = getattr(module, name).detach().to("meta")
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))


@torch.no_grad()
def test_an_offloaded_vae_decodes_the_same_video():
    vae = load_vae(ROOT / "assets" / "miniature")
    latents = torch.linspace(-1, 1, 4 * 2 * 16).reshape(1, 4, 2, 4, 4)
    offloaded = copy.deepcopy(vae).requires_grad_(False)
    offloaded.offloaded = OnMeta(offloaded, CPU)
    offloaded.offloaded.leave()
    assert device_of(offloaded) == CPU and offloaded.device.type == "meta"
    with on_device(offloaded), on_device(offloaded):
        assert torch.equal(offloaded.decode(latents).sample, vae.decode(latents).sample)
    assert offloaded.device.type == "meta"
    with pytest.raises(RuntimeError, match="out of memory"), on_device(offloaded):
        raise RuntimeError("out of memory")
    assert offloaded.device.type == "meta"


@torch.no_grad()
def test_frozen_weights_in_fp8_leave_and_come_back_and_trained_ones_stay():
    layer = Fp8Linear(32, 16)
    layer.store(torch.linspace(-1, 1, 512).reshape(16, 32))
    model = torch.nn.ModuleDict({"frozen": layer, "trained": torch.nn.Linear(16, 16)})
    tokens = torch.linspace(-1, 1, 64).reshape(2, 32)
    expected = layer(tokens)
    trained = model["trained"].weight
    layer.requires_grad_(False)
    weights = OnMeta(model, CPU)
    weights.leave()
    assert layer.weight.device.type == "meta"
    assert model["trained"].weight is trained
    weights.come_back()
    assert torch.equal(layer(tokens), expected)
