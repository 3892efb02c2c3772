"""What a block keeps for its backward pass, against the project's own forward pass on tensors without storage."""

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from hyvideo.config.memory import activations
from hyvideo.config.memory import persistent as states
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.models.transformer import install
from tests.config.memory.simulated import simulated

GRID, TEXT = (3, 30, 53), 100  # 9 frames
RUN = replace(simulated(sample_n_frames=9), text_tokens=TEXT, architecture=Architecture(num_layers=1))
KEPT = RUN.with_settings(enable_gradient_checkpointing=False)


@dataclass(frozen=True)
class Held:
    """Bytes beside the parameters, under autocast as in the trainer."""

    peak: int
    after: int


def forward(num_layers: int, *, grid=GRID, with_gradient: bool = True, recompute: bool = False) -> Held:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = HunyuanVideo15Transformer3DModel(num_layers=num_layers, num_refiner_layers=1)
        install(model)
        if recompute:
            model.enable_gradient_checkpointing()
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker, torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(with_gradient):
            output = model(
                hidden_states=torch.empty(1, 65, *grid),
                timestep=torch.empty(1),
                texts=[torch.empty(TEXT, 3584)],
                glyphs=[torch.empty(0, 1472)],
                images=[torch.empty(0, 1152)],
            )
            held = sum(device["Total"] for device in tracker.get_tracker_snapshot("current").values())
        peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
        del output
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Held(peak - parameters, held - parameters)


def kept_per_block(*, recompute: bool) -> int:
    """Without the copy of the weights that autocast keeps."""
    two, one = (forward(num_layers, recompute=recompute).after for num_layers in (2, 1))
    return two - one - 2 * Architecture().block_parameters


def test_a_block_keeps_what_the_forward_pass_keeps():
    assert kept_per_block(recompute=False) == pytest.approx(activations.kept_bytes(KEPT), rel=0.1)


def test_a_recomputed_block_keeps_its_input():
    assert kept_per_block(recompute=True) == pytest.approx(activations.kept_bytes(RUN), rel=0.05)


def test_a_forward_without_gradient_holds_what_it_is_said_to_hold():
    long = replace(KEPT, architecture=Architecture(num_layers=1, num_refiner_layers=1))
    long = long.with_settings(sample_n_frames=121, enable_fsdp=False)
    cast_weights = states.working_weight_bytes(long, with_gradient=False)
    peak = forward(1, with_gradient=False, grid=(31, 30, 53)).peak
    assert peak - cast_weights == pytest.approx(activations.inference_bytes(long, 1), rel=0.05)


def test_sequence_parallelism_divides_image_tokens_and_heads_but_not_text():
    run = RUN.with_settings(sp_size=4)
    assert activations.tokens_outside_attention(run) == 3 * 30 * 53 / 4 + TEXT
    assert activations.tokens_inside_attention(run) == (3 * 30 * 53 + TEXT) / 4
