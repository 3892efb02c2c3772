"""Prints the work that the project would give a GPU, as JSON. test_fake_cuda.py runs it in a
separate process.

One sample at a time, as on a GPU: 480 x 864, 81 frames, a block of full width, bf16, 200 text
tokens.
"""

from tests.fake_cuda import device, sharded, streams  # first, before torch looks for CUDA
from tests.fake_cuda.device import Count, fake_mode, on_device, prepare_process

# isort: split

import gc
import json
import os
import sys
import threading

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from hyvideo.distributed.collectives import average_gradients, clip_gradients
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.models import attention_kernels
from hyvideo.models.attention import Layout
from hyvideo.models.conditions import Condition, Conditions, ImageCondition
from hyvideo.models.decoding import Tiling, set_tiling, use_channels_last
from hyvideo.models.family import family_of, freeze_unused_parameters, install
from hyvideo.models.fp8 import Fp8Linear, use_fp8
from hyvideo.models.hunyuan_video15.vae import install_layers
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.models.offload import put
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.sections import OptimizerSettings
from hyvideo.training.anchor import WeightCopy
from hyvideo.training.optimizers import make_optimizers
from hyvideo.training.rollout_batch import select

BF16 = torch.bfloat16
GRID = (21, 30, 54)
MESH = Mesh(rank=0, world_size=1, sp_size=1)


CUDA = torch.device("cuda", 0)


def empty(*shape, dtype=BF16, device="cuda"):
    return torch.empty(*shape, dtype=dtype, device=device)


def transformer(recompute, *, lora=False, fp8=False, num_layers=1):
    with torch.device("meta"):
        model = HunyuanVideo15Transformer3DModel(num_layers=num_layers).eval()
        install(model)
        freeze_unused_parameters(model)
        if fp8:
            use_fp8(model)
        if lora:
            add_trainable_lora(model, training_config(model, rank=32, alpha=32))
    on_device(model, BF16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.store(module.weight.detach())
    parallelize(model, MESH, recompute=recompute)
    return model


def trained(model):
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def autoencoder(layers_per_block=1):
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15(layers_per_block=layers_per_block).eval()
    install_layers(vae)
    on_device(vae, torch.float16)
    use_channels_last(vae)
    set_tiling(vae, Tiling(256, 0.25))
    return vae


def take_counts(count):
    """Return the counts so far and reset them."""
    counts = {
        "teraflop": count.teraflop,
        "peak": count.peak / 2**30,
        "waits": dict(count.waits),
        "copies": dict(count.copies),
    }
    gc.collect()
    count.clear()
    return counts


def one_block(count):
    """Count the forward pass of a block for one branch."""
    # the last block has unused outputs
    block = transformer("none", num_layers=2).transformer_blocks[0]
    tokens, text = 34_020, 200
    cos, sin = empty(tokens, 128, dtype=torch.float32), empty(tokens, 128, dtype=torch.float32)
    time, layout = empty(1, 2048), Layout(cos, sin, (text,), tokens)
    image, context = (empty(1, number, 2048) for number in (tokens, text))
    with count, torch.autocast("cuda", BF16), torch.no_grad():
        block(image, context, time, layout)
    return {"forward": take_counts(count)}


def passes(count, pipeline, schedule):
    """Count a rollout step, its replay, its backward pass and the update, with image-to-video
    conditions.
    """
    picture = ImageCondition(empty(729, 1152), empty(32, *GRID[1:], dtype=torch.float32))
    conditions = Conditions((Condition(empty(200, 3584), empty(12, 1472), picture),))
    stored = empty(2, 3, 32, *GRID, dtype=torch.float32)
    found = {}
    with count:
        with torch.no_grad():
            latents = select(stored, [1], [2])
            velocity = pipeline.velocity_at_steps(latents, schedule, [5], conditions)
            step = schedule.step(velocity, latents, 5, torch.empty_like(latents))
        found["rollout step"] = take_counts(count)
        again = pipeline.replay(latents, step.sample, schedule, [5], conditions)
        found["replay"] = take_counts(count)
        again.log_prob.sum().backward()
        found["backward"] = take_counts(count)
        parameters = trained(pipeline.transformer)
        average_gradients(parameters.values(), MESH, is_sharded=False)
        clip_gradients(list(parameters.values()), 1.0)
        found["norm"] = take_counts(count)
        hidden = family_of(pipeline.transformer).target_modules
        make_optimizers(OptimizerSettings(optimizer="muon"), parameters, BF16, hidden=hidden).step(
            1e-5
        )
        found["optimizer step"] = take_counts(count)
    return found


def exchange(count, model, *, offload):
    parameters = trained(model)
    with count:
        weights = WeightCopy(model, parameters, offload=offload)
        count.clear()
        with weights.swapped_in():
            pass
    return take_counts(count) | {"tensors": len(parameters)}


def ema(count, model, *, offload):
    """Count the update of an EMA after an optimizer step."""
    parameters = trained(model)
    with count:
        weights = WeightCopy(model, parameters, offload=offload)
        count.clear()
        weights.move_towards(0.1)
    interpolated = sum(number for name, number in count.kernels.items() if name.startswith("lerp"))
    return take_counts(count) | {"tensors": len(parameters), "interpolated": interpolated}


def decode(count, pipeline):
    with count:
        pipeline.decode(empty(1, 32, 3, 12, 24, dtype=torch.float32))  # two tiles
    return take_counts(count)


def offloaded_vae(count, pipeline):
    """Count a decode by an offloaded VAE.

    The devices are those of its weights outside and inside.
    """
    inside = set()
    pipeline.vae.decoder.register_forward_pre_hook(lambda module, _: inside.update(devices(module)))
    with count:
        put(pipeline.vae.requires_grad_(False), Placement.CPU, CUDA)
        before = devices(pipeline.vae)
        count.clear()
        pipeline.decode(empty(1, 32, 3, 12, 12, dtype=torch.float32))
    places = {"before": before, "inside": sorted(inside), "after": devices(pipeline.vae)}
    return take_counts(count) | places | {"left": count.live, "pipeline": pipeline.device.type}


def devices(module):
    return sorted({parameter.device.type for parameter in module.parameters()})


def tile(count, pipeline):
    """Count the decoding of one tile of 33 frames by the released VAE."""
    pipeline.vae = autoencoder(layers_per_block=2)
    with count:
        pipeline.try_decoding(33, 480, 864)
        return take_counts(count)


def kernels(count):
    """Count attention in passes through a block by its kernel, with selective activation
    checkpointing.

    The kernel "torch" is torch's own choice of cuDNN, here with full checkpointing. What is
    requested of cuDNN is recorded without and with gradient.
    """
    tokens, text = GRID[0] * GRID[1] * GRID[2], 200
    cos, sin = empty(tokens, 128, dtype=torch.float32), empty(tokens, 128, dtype=torch.float32)
    inputs = empty(1, 2048), Layout(cos, sin, (text,), tokens)
    image, context = (empty(1, number, 2048).requires_grad_() for number in (tokens, text))
    gradients = empty(1, tokens, 2048), empty(1, text, 2048)
    block = transformer("full", num_layers=2).transformer_blocks[0]
    found = {}
    for kernel, recompute in {"flash": "selective", "cudnn": "selective", "torch": "full"}.items():
        attention_kernels.use(kernel)
        device.attention_kernel = "flash" if kernel == "flash" else "cudnn"
        with count, torch.autocast("cuda", BF16):
            count.clear()
            with torch.no_grad():
                block(image, context, *inputs)
            requested = [[*count.log_sum_exp]]
            count.clear()
            out = block(image, context, *inputs, recompute=recompute)
            torch.autograd.backward(out, gradients)
            requested.append([*count.log_sum_exp])
            found[kernel] = {"log-sum-exp": requested, "teraflop": count.teraflop["attention"]}
            del out
    device.attention_kernel = "flash"
    attention_kernels.use("torch")
    return found


def reward_thread(count):
    """Score on device 3; return the devices and streams of the thread's operators, and its devices
    with a context.
    """
    gpu, videos = torch.device("cuda", 3), empty(2, 3, dtype=torch.float32, device="cuda:3")

    class Brightness:
        def score(self, batch, prompts, *, fps):
            with count:  # modes belong to a thread
                videos.mean(1)
            return [{"VQ": 1.0} for _ in batch]

    torch.cuda.set_device(gpu)
    scorer = AsyncScorer({"test": Brightness()}, {"VQ": 1.0}, device=gpu)
    rewards = scorer.measure([empty(1, dtype=torch.uint8, device="cpu")] * 2, ["", ""], fps=8)
    thread, *after = scorer._worker.submit(
        lambda: (threading.get_native_id(), *streams.current())
    ).result()
    scorer.close()
    torch.cuda.set_device(0)
    return {
        "rewards": [reward.total for reward in rewards],
        "operators": [*count.places],
        "after": after,
        "contexts": streams.contexts(thread),
    }


def main():
    schedule = prepare_process()
    mesh = sharded.mesh()
    with fake_mode():
        negative = Condition(empty(12, 3584))
        pipeline = GRPOPipeline(
            transformer("selective"),
            autoencoder(),
            sampling=SamplerSettings(batched_forward=False),
            negative=negative,
            compute_dtype=BF16,
        )
        found = {
            "block": one_block(Count()),
            "passes": passes(Count(), pipeline, schedule),
            "decode": decode(Count(), pipeline),
            "kernels": kernels(Count()),
            "reward thread": reward_thread(Count()),
            "sharded": sharded.sharded(mesh, GRID),
            "tile": tile(Count(), pipeline),
            "exchange": exchange(Count(), pipeline.transformer, offload=False),
            "offloaded exchange": exchange(Count(), pipeline.transformer, offload=True),
            "EMA": ema(Count(), pipeline.transformer, offload=False),
            "offloaded EMA": ema(Count(), pipeline.transformer, offload=True),
            "offloaded VAE": offloaded_vae(Count(), pipeline),  # last: it changes the pipeline
        }
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
