"""Tests of sampling, replay and decoding, with random weights of the real model classes."""

import dataclasses

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.guidance import Guidance
from hyvideo.schedulers.schedule import Schedule

REQUESTS = [Request("a red circle moves up"), Request("a blue square moves left slowly")]


@pytest.fixture
def parts(tiny_config):
    """Return a pipeline with guidance scale 3, the conditions of two prompts and their initial
    noise.
    """
    config, device = tiny_config.with_settings(cfg_scale=3.0), torch.device("cpu")
    encoder, vae = load_encoder(config, device)
    pipeline = load_pipeline(config, device, encoder=encoder, vae=vae, kinds=frozenset({"text"}))
    noise = normal((2, *pipeline.latent_shape(5, 16, 16)), "test")
    return pipeline, encoder(REQUESTS), noise


def step_noise(noise):
    return lambda step: normal(tuple(noise.shape), "step", step)


def schedule_of(sde_type="sage_grpo", num_steps=4, eta=0.5):
    return Schedule.build(sde_type, num_steps=num_steps, shift=3.0, eta=eta)


def with_sampling(pipeline, **changes):
    pipeline.sampling = dataclasses.replace(pipeline.sampling, **changes)
    return pipeline


def test_rollouts_keep_all_latents_or_those_of_the_first_step_and_the_end(parts):
    pipeline, conditions, noise = parts
    for num_steps, kept in ((1, [0, 1]), (2, [0, 1, 2]), (4, [0, 1, 4])):
        schedule = schedule_of(num_steps=num_steps)
        every = pipeline.sample(conditions, noise, schedule, step_noise(noise))
        ends = pipeline.sample(conditions, noise, schedule, step_noise(noise), keeps_all=False)
        assert torch.equal(ends.latents, every.latents[:, kept]) and torch.equal(
            ends.final, every.final
        )
        assert torch.equal(ends.log_probs, every.log_probs)


@torch.no_grad()
def test_batched_guidance_equals_separate_forward_passes(parts):
    pipeline, conditions, noise = parts
    timestep = torch.tensor([900.0, 400.0])
    together = pipeline.velocity(noise, timestep, conditions)
    apart = with_sampling(pipeline, batched_forward=False).velocity(noise, timestep, conditions)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    single = with_sampling(pipeline, guidance=Guidance(1.0)).velocity(noise, timestep, conditions)
    assert not torch.allclose(single, apart)


def test_without_batched_forward_a_row_is_bitwise_equal_in_every_batch_with_and_without_gradient(
    parts,
):
    pipeline, conditions, noise = parts
    assert len(conditions.samples[0].text) != len(conditions.samples[1].text)
    pipeline.compute_dtype, timestep, calls = torch.bfloat16, torch.tensor([900.0, 400.0]), []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((len(args[0]), len(kwargs["conditions"][0].text))),
        with_kwargs=True,
    )
    with torch.no_grad():
        sampled = with_sampling(pipeline, batched_forward=False).velocity(
            noise, timestep, conditions
        )
    lengths = [
        len(text)
        for text in (
            pipeline.negative.text,
            pipeline.negative.text,
            *(condition.text for condition in conditions.samples),
        )
    ]
    assert calls == [(1, length) for length in lengths]
    for row in range(2):
        trained = pipeline.velocity(noise[[row]], timestep[[row]], conditions.select([row]))
        assert trained.requires_grad and torch.equal(trained[0], sampled[row])


@torch.no_grad()
@pytest.mark.parametrize("batched, batches", [(True, [3]), (False, [1, 1, 1])])
def test_only_rows_inside_the_guidance_interval_are_guided(parts, batched, batches):
    pipeline, conditions, noise = parts
    timestep, plain = torch.tensor([900.0, 400.0]), []
    for row, scale in ((0, 1.0), (1, 3.0)):
        single = with_sampling(pipeline, guidance=Guidance(scale))
        plain.append(single.velocity(noise[[row]], timestep[[row]], conditions.select([row])))
    calls = []
    pipeline.transformer.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    guidance = Guidance(3.0, interval=(0.2, 0.4))
    inside = with_sampling(pipeline, guidance=guidance, batched_forward=batched)
    torch.testing.assert_close(
        inside.velocity(noise, timestep, conditions), torch.cat(plain), rtol=1e-5, atol=1e-5
    )
    assert calls == batches and inside.num_forwards(timestep) == sum(batches)


def test_sampling_with_eta_0_equals_the_ode(parts):
    pipeline, conditions, noise = parts
    ode = pipeline.sample_ode(conditions, noise, schedule_of(eta=0.5))
    assert torch.equal(pipeline.sample_ode(conditions, noise, Schedule.ode(4, 3.0)), ode)
    rollout = pipeline.sample(conditions, noise, schedule_of(eta=0.0), step_noise(noise))
    assert torch.equal(rollout.final, ode)
    assert rollout.log_probs.abs().max() == 0


@torch.no_grad()
@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_a_replay_reproduces_the_log_probs_of_a_rollout_exactly(parts, sde_type):
    pipeline, conditions, noise = parts
    schedule, kept = schedule_of(sde_type), torch.tensor([[2, 0, 1], [1, 3, 2]])
    rollout = pipeline.sample(conditions, noise, schedule, step_noise(noise), mean_steps=kept)
    assert rollout.means.shape == (2, 3, *noise.shape[1:])
    for i in range(4):
        step = pipeline.replay(
            rollout.latents[:, i], rollout.latents[:, i + 1], schedule, [i, i], conditions
        )
        assert torch.equal(step.log_prob, rollout.log_probs[:, i])
        for row, place in (kept == i).nonzero().tolist():
            assert torch.equal(step.mean[row], rollout.means[row, place])


def test_videos_decode_equally_alone_and_in_a_batch(parts):
    pipeline, _, noise = parts
    assert pipeline.decode(torch.stack([noise[0] * torch.nan, noise[1]]), batch_size=2)[0] is None
    together, alone = pipeline.decode(noise, batch_size=2), pipeline.decode(noise, batch_size=1)
    assert together[0].shape == (5, 3, 16, 16) and together[0].dtype == torch.uint8
    for a, b in zip(together, alone):
        assert (a.int() - b.int()).abs().max() <= 1
