"""Cached modulation: results equal to the bit, few passes over the matrices, and only if they are
frozen.
"""

import json

import pytest
import torch

from hyvideo.distributed.parallelize import parallelize
from hyvideo.models.conditions import Condition
from hyvideo.models.family import family_of, freeze_unused_parameters, install
from hyvideo.models.lora import add_trainable_lora, training_config
from hyvideo.trainer import Trainer
from tests.distributed.test_sequence_parallel import tiny_transformer

CPU = torch.device("cpu")
TIMES = (990.3, 412.7, 55.1)


def with_lora(**options):
    model = tiny_transformer()
    install(model)
    freeze_unused_parameters(model)
    add_trainable_lora(model, training_config(model, rank=2, alpha=2.0, **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def cached(model):
    model.modulation_cache = family_of(model).cache_modulation(model)
    return model


def call(model, times, dtype=torch.float32):
    """Return the velocity of a sample at each time, in one forward pass with gradient."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 2, 4, 4, generator=generator).repeat(len(times), 1, 1, 1, 1)
    conditions = [Condition(torch.randn(7, 12, generator=generator))] * len(times)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        if model.modulation_cache:
            model.modulation_cache.select([(time, None) for time in times])
        return model(latents, timestep=torch.tensor(times), conditions=conditions)


def gradients(model, velocity):
    model.zero_grad()
    velocity.float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("dtype, recompute", [(torch.float32, "none"), (torch.bfloat16, "full")])
def test_outputs_and_gradients_of_one_sample_are_equal_to_the_bit(mesh, dtype, recompute):
    plain, ours = with_lora(), cached(with_lora())
    for model in (plain, ours):
        parallelize(model, mesh, recompute=recompute)
    for time in TIMES:
        expected, found = call(plain, [time], dtype), call(ours, [time], dtype)
        assert torch.equal(found, expected)
        assert all(map(torch.equal, gradients(ours, found), gradients(plain, expected)))


def test_samples_of_a_batch_have_their_own_timesteps():
    plain, ours = with_lora(), cached(with_lora())
    torch.testing.assert_close(call(ours, TIMES), call(plain, TIMES))
    swapped = call(ours, TIMES[::-1])
    assert torch.equal(swapped.flip(0), call(ours, TIMES))


def test_trained_layers_are_not_cached():
    targets = r"transformer_blocks\.0\.norm1\.linear"
    assert cached(with_lora()).modulation_cache is not None
    assert cached(with_lora(targets=[targets])).modulation_cache is None
    assert (
        cached(with_lora(targets=[r"time_embed\.timestep_embedder\.linear_1"])).modulation_cache
        is None
    )
    full = tiny_transformer()
    install(full)
    assert cached(full).modulation_cache is None


NFT = {
    "objective": "nft",
    "nft_levels": 2,
    "eta": 0.0,
    "num_updates_per_rollout": 2,
    "kl_weight": 0.3,
    "cfg_scale": 2.0,
    "valid_video_csv": "assets/miniature/prompts/smoke.csv",
    "validation_steps": 3,
}


@pytest.mark.slow
def test_a_run_has_the_same_metrics(tiny_config, mesh, tmp_path):
    """Rollout, anchor, update, and a validation with another number of steps, one sample at a
    time.
    """
    config = tiny_config.with_settings(
        **NFT, lora_rank=2, batched_forward="false", learning_rate=1e-3
    )
    found = []
    for name in ("plain", "cached"):
        trainer = Trainer(config.with_settings(output_dir=str(tmp_path / name)), mesh, CPU)
        if name == "cached":
            assert cached(trainer.run.policy.transformer).modulation_cache
        metrics = {}
        for trainer.iteration in (1, 2):
            metrics |= trainer.run_iteration()
        metrics |= trainer.validate() if trainer.validation else {}
        found.append(
            {
                name: value
                for name, value in metrics.items()
                if not name.startswith(("time/", "memory/", "perf/"))
            }
        )
    assert json.dumps(found[0]) == json.dumps(found[1])  # NaN is equal to NaN
    assert found[0]["grad/norm"] > 0
