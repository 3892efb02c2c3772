"""Prints the peak GPU memory in GiB of phases of the 24 GB recipe, as JSON, by type of the frozen
weights.

Weights, optimizer state, gradients and the VAE are counted. test_phases.py runs it in a separate
process.
"""

from tests.fake_cuda import checks, device  # first, before torch looks for CUDA

# isort: split

import gc
import json
import os

import torch

from hyvideo.loss.nft import NFTInputs, nft_terms
from hyvideo.loss.trust_region import KLWeights
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import family_of
from hyvideo.models.guidance import Guidance
from hyvideo.models.offload import put
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.training.anchor import Anchor
from hyvideo.training.optimizers import make_optimizers
from tests.fake_cuda.test_phases import narrow, recipe


def iteration(run, schedule, with_decode):
    """Return the peak of each phase."""
    peaks, settings = {}, run.settings

    def end(phase):
        peaks[phase] = max(peaks.get(phase, 0), count.peak / 2**30)
        gc.collect()
        count.clear()

    def split(block, inputs, outputs):
        """End a phase when the backward pass of the first block, the last one, begins."""
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: end("backward begins"))

    with device.Count() as count:
        vae, fp8 = checks.autoencoder(layers_per_block=2), settings.base_weight_dtype == "fp8"
        put(vae.requires_grad_(False), Placement.CPU, checks.CUDA)
        model = checks.transformer(
            run.checkpointing, lora=True, fp8=fp8, num_layers=run.architecture.num_layers
        )
        model.modulation_cache = family_of(model).cache_modulation(model)
        model.transformer_blocks[0].register_forward_hook(split)
        parameters = checks.trained(model)
        anchor = Anchor(model, parameters, refresh_every=None, offload=True)
        optimizers = make_optimizers(
            run.config.optimizer, parameters, checks.BF16, hidden=family_of(model).target_modules
        )
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
        optimizers.step(1e-5)  # creates the optimizer state
        optimizers.zero_grad()
        sampling = SamplerSettings(
            Guidance(settings.cfg_scale), batched_forward=run.config.is_batched
        )
        pipeline = GRPOPipeline(model, vae, sampling=sampling, compute_dtype=checks.BF16)
        shape, rows = pipeline.latent_shape(*run.config.sampling.size), settings.batch_size
        latents, one = (
            checks.empty(rows, *shape, dtype=torch.float32),
            checks.empty(1, *shape, dtype=torch.float32),
        )
        text = Conditions(
            (Condition(checks.empty(run.text_tokens - 12, 3584), checks.empty(12, 1472)),)
        )
        gc.collect()
        count.clear()
        with torch.no_grad():
            pipeline.velocity_at_steps(latents, schedule, [5] * rows, text.select([0] * rows))
            end("rollout")
            if with_decode:
                shape = pipeline.latent_shape(
                    *narrow(settings.base_weight_dtype).config.sampling.size
                )
                pipeline.decode(checks.empty(1, *shape, dtype=torch.float32))
                end("decode")
            with anchor.swapped_in():
                reference = pipeline.velocity_at_steps(one, schedule, [5], text)
            end("anchor")
        for _ in range(2):  # the second pass has gradients from its beginning
            velocity = pipeline.velocity_at_steps(one, schedule, [5], text)
            inputs = NFTInputs(velocity, one, one, checks.empty(1), reference)
            terms = nft_terms(
                inputs, advantage_clip=5, kl_weights=KLWeights(1, 0.1), kl_coefficient=0.03
            )
            terms.loss.sum().backward()
            end("backward ends")
        optimizers.step(1e-5)
        end("optimizer")
    return peaks


def main():
    schedule = device.prepare_process()
    with device.fake_mode():  # decoding is the same for both
        with_decode = {"bf16": False, "fp8": True}
        counted = {
            kind: iteration(recipe(kind), schedule, decode) for kind, decode in with_decode.items()
        }
    print(json.dumps(counted), flush=True)
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
