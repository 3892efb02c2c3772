"""Prints the GPU memory in GiB of each stage of generate.py with group offloading, as JSON, in a
separate process.

HunyuanVideo-1.5 at full width, 480 x 848, 121 frames; weights are counted. Fewer blocks than in the
real models change nothing, because only a group of them is on the GPU.
"""

from tests.fake_cuda import device  # first, before torch looks for CUDA

# isort: split

import gc
import json
import os
import sys
from contextlib import nullcontext

import torch
from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel
from torch import nn
from transformers import Qwen2_5_VLTextModel

from hyvideo.generation.step_cache import step_cache
from hyvideo.generation.step_caching import StepCaching
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import prepare
from hyvideo.models.guidance import Guidance
from hyvideo.models.offload import on_device, put
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Partner, SamplerSettings
from hyvideo.schedulers.schedule import Schedule
from tests.fake_cuda.checks import autoencoder, empty

NUM_BLOCKS = 5  # a group of four and another one
GRID = (31, 30, 53)
CUDA = torch.device("cuda", 0)
LANGUAGE_MODEL = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "attn_implementation": "eager",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}


def encode():
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(Qwen2_5_VLTextModel.config_class(**LANGUAGE_MODEL)).eval()
        model.requires_grad_(False)
    device.on_device(model, torch.float16, "cpu")
    with device.Count() as count, torch.no_grad():
        put(model, Placement.BLOCKS, CUDA, pinned=False)
        with on_device(model):
            model(input_ids=torch.zeros(1, 308, dtype=torch.long, device=CUDA), use_cache=False)
    return count.peak / 2**30


def sample_and_decode(schedule, *, skips_blocks=False):
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(num_layers=NUM_BLOCKS).eval().requires_grad_(False)
        prepare(model, ("text",))
    device.on_device(model, torch.bfloat16, "cpu")
    with device.Count() as count:
        put(model, Placement.BLOCKS, CUDA)
        vae = autoencoder()
        put(vae.requires_grad_(False), Placement.CPU, CUDA)
        text = Condition(empty(200, 3584), empty(12, 1472))
        sampling = SamplerSettings(Guidance(1), batched_forward=False)
        pipeline = GRPOPipeline(
            model, vae, sampling=sampling, negative=text, compute_dtype=torch.bfloat16
        )
        latents = empty(1, 32, *GRID, dtype=torch.float32)
        count.clear()
        # all blocks but the last two are skipped at three of four steps
        caching = StepCaching(
            cache_start_step=0, no_cache_block_id=(NUM_BLOCKS - 2, NUM_BLOCKS - 1)
        )
        with (
            on_device(model),
            torch.no_grad(),
            step_cache(model, caching) if skips_blocks else nullcontext(),
        ):
            # the first finds the order of the groups
            for step in range(7) if skips_blocks else (0, 4):
                pipeline.velocity_at_steps(latents, schedule, [step], Conditions((text,)))
        sampling = count.peak / 2**30
        if skips_blocks:  # the tile is the same
            return {"sampling": sampling}
        gc.collect()
        count.clear()
        pipeline.decode(latents[..., :16, :16])  # one tile
    return {"sampling": sampling, "tile": count.peak / 2**30}


def sample_by_two_experts(schedule):
    """Return the GiB of the weights of an expert of the width of A14B, and of the peak of sampling
    with both offloaded, and the copies to the GPU.
    """
    experts = []
    for _ in range(2):
        with torch.device("meta"):
            sizes = {"num_attention_heads": 40, "ffn_dim": 13_824, "num_layers": 2}
            model = WanTransformer3DModel(**sizes).eval().requires_grad_(False)
            prepare(model, ("text",))
        device.on_device(model, torch.bfloat16, "cpu")
        experts.append(model)
    torch.Tensor.pin_memory = torch.Tensor.clone  # of rotary tables, which FakeTensors lack
    text = Condition(empty(20, 4096))
    with device.Count() as count:
        for model in experts:
            put(model, Placement.CPU, CUDA)
        sampling = SamplerSettings(Guidance(1), batched_forward=False)
        vae = nn.Linear(1, 1, device=CUDA)  # for the pipeline's device
        partner = Partner(experts[1], "low", 0.875)
        pipeline = GRPOPipeline(
            experts[0], vae, sampling=sampling, compute_dtype=torch.bfloat16, partner=partner
        )
        latents = empty(1, 16, 2, 8, 8, dtype=torch.float32)
        count.clear()
        for _ in pipeline._sample_steps(Conditions((text,)), latents, schedule, None):
            pass
    weights = sum(parameter.nbytes for parameter in experts[0].parameters())
    return {"weights": weights / 2**30, "peak": count.peak / 2**30, "copies": dict(count.copies)}


def main():
    schedule = device.prepare_process()
    # with real timesteps, which decide the expert
    steps_of_both = Schedule.ode(4, 5.0)
    assert len(steps_of_both.timesteps) == len(steps_of_both.ends)
    with device.fake_mode():
        found = {
            "encoding": encode(),
            "group": sample_and_decode(schedule),
            "experts": sample_by_two_experts(steps_of_both),
            "cached": sample_and_decode(schedule, skips_blocks=True),
        }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
