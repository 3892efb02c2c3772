"""Offloading of frozen modules. tests/fake_cuda checks the copies between a CPU and a GPU,
tests/cuda the videos.
"""

import copy

import pytest
import torch
from torch import nn

from hyvideo.models.fp8 import Fp8Linear
from hyvideo.models.loading import load_vae
from hyvideo.models.offload import FrozenWeights, Offloaded, away, device_of, on_device, put
from hyvideo.models.placement import Placement
from tests.forked import ROOT

CPU = torch.device("cpu")


class OnMeta(FrozenWeights):
    """Weights that are away on the meta device, which cannot compute."""

    def leave(self):
        for places in self._places:
            for module, name in places:
                weight = getattr(module, name).detach().to("meta")
                setattr(module, name, nn.Parameter(weight, requires_grad=False))


def away_on_meta(module):
    module.offloaded = Offloaded(OnMeta(module.modules(), CPU, pinned=False), None)
    module.offloaded.leave()


@torch.no_grad()
def test_an_offloaded_vae_decodes_the_same_video():
    vae = load_vae(ROOT / "assets" / "miniature")
    latents = torch.linspace(-1, 1, 4 * 2 * 16).reshape(1, 4, 2, 4, 4)
    offloaded = copy.deepcopy(vae).requires_grad_(False)
    away_on_meta(offloaded)
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
    model = nn.ModuleDict({"frozen": layer, "trained": nn.Linear(16, 16)})
    tokens = torch.linspace(-1, 1, 64).reshape(2, 32)
    expected = layer(tokens)
    trained = model["trained"].weight
    layer.requires_grad_(False)
    away_on_meta(model)
    assert layer.weight.device.type == "meta"
    assert model["trained"].weight is trained
    model.offloaded.come_back()
    assert torch.equal(layer(tokens), expected)


def test_weights_that_are_on_the_device_are_not_copied_again_and_return_to_where_they_were():
    """A validation scores its videos while the policy of a training is on the GPU, and that of
    scripts.evaluate is not.
    """
    model = nn.Linear(3, 3).requires_grad_(False)
    away_on_meta(model)
    with away(model):
        pass
    assert model.weight.device.type == "meta"
    model.offloaded.come_back()
    weight = model.weight
    model.offloaded.come_back()
    assert model.weight is weight
    with away(model):
        assert model.weight.device.type == "meta"
    assert model.weight.device.type == "cpu"


@torch.no_grad()
def test_weights_that_modules_share_are_kept_and_copied_once():
    """UMT5 has its token embedding under two names: 2 GiB."""
    model = nn.ModuleDict({"first": nn.Embedding(5, 3), "second": nn.Embedding(5, 3)})
    model["second"].weight = model["first"].weight.requires_grad_(False)
    away_on_meta(model)
    model.offloaded.come_back()
    assert model["first"].weight is model["second"].weight


class Model(nn.Module):
    """Five blocks of two shapes; ``skipped`` blocks are not called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(Fp8Linear(32, width), nn.GELU(), nn.Linear(width, 32))
            for width in (64, 48, 64, 48, 64)
        )
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)
        self.requires_grad_(False)
        for block in self.blocks:
            block[0].store(block[0].weight.detach())
        self.skipped = ()

    def forward(self, tokens):
        tokens = self.first(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                tokens = tokens + block(tokens)
        return tokens


@torch.no_grad()
def test_streamed_blocks_compute_the_same_and_two_of_them_are_on_the_device():
    model = Model()
    streamed = copy.deepcopy(model)
    put(streamed, Placement.BLOCKS, CPU)
    tokens = torch.linspace(-1, 1, 6).reshape(2, 3)
    kept = {name: weight.data_ptr() for name, weight in streamed.named_parameters()}
    # weights in the memory of blocks that compute, seen by a block
    memory = set()
    for block in streamed.blocks:
        block[2].register_forward_pre_hook(lambda layer, _: memory.add(layer.weight.data_ptr()))
    with on_device(streamed):
        for skipped in ((), (), (0, 2, 3), (4,)):
            model.skipped = streamed.skipped = skipped
            assert torch.equal(streamed(tokens), model(tokens)), skipped
    assert len(memory) == 2, "a block of each shape at a time"
    assert kept == {name: weight.data_ptr() for name, weight in streamed.named_parameters()}
    for name, weight in model.named_parameters():
        found = streamed.get_parameter(name)
        if name.endswith("0.weight"):
            weight, found = weight.dequantize(), found.dequantize()
        assert torch.equal(found, weight), name
    with pytest.raises(AssertionError, match="on_device"):
        streamed(tokens)
