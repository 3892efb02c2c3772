"""Offloading of frozen modules. tests/fake_cuda checks the copies between a CPU and a GPU,
tests/cuda the videos.
"""

import copy

import pytest
import torch

from hyvideo.models.loading import load_vae
from hyvideo.models.offload import device_of, on_device
from tests.forked import ROOT

CPU = torch.device("cpu")


@torch.no_grad()
def test_an_offloaded_vae_decodes_the_same_video():
    """The meta device, which cannot compute, stands for the memory where the weights are between
    decodes.
    """
    vae = load_vae(ROOT / "assets" / "miniature")
    latents = torch.linspace(-1, 1, 4 * 2 * 16).reshape(1, 4, 2, 4, 4)
    offloaded = copy.deepcopy(vae).to("meta")
    offloaded.home, offloaded.hosts = CPU, vae.state_dict()
    assert device_of(offloaded) == CPU and offloaded.device.type == "meta"
    with on_device(offloaded), on_device(offloaded):
        assert torch.equal(offloaded.decode(latents).sample, vae.decode(latents).sample)
    offloaded.to("meta")
    with pytest.raises(RuntimeError, match="out of memory"), on_device(offloaded):
        raise RuntimeError("out of memory")
    for name, tensor in offloaded.state_dict().items():
        assert tensor.data_ptr() == offloaded.hosts[name].data_ptr()
