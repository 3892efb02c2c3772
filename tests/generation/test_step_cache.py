"""Step caching: trajectories of the original on a small model, the schedule, and what is stored."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.generation.step_cache import step_cache
from hyvideo.generation.step_caching import StepCaching
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import blocks, install
from hyvideo.models.guidance import Guidance
from hyvideo.models.loading import load_transformer
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.schedulers.schedule import Schedule
from tests.models.conftest import (
    GOLDEN,
    golden_state,
    seeded_normal,
    transformer_weight,
    write_model,
)
from tests.tiny_wan import write_wan

CASES = json.loads((GOLDEN / "step_cache.json").read_text())
KINDS = {kind: kind.partition("_")[0] for kind in ("deepcache", "deepcache_two", "deepcache_inner")}
KINDS |= {kind: kind for kind in ("teacache", "taylorcache")}
TOLERANCE = 2e-5  # of the largest value; the largest difference was 9.8e-6 (measured)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    config, state = golden_state("step_cache.json", transformer_weight)
    root = tmp_path_factory.mktemp("step_cache")
    write_model(root / "transformer" / "480p_t2v", config, state)
    transformer = load_transformer(root, "480p_t2v")
    install(transformer)
    return transformer


def conditions():
    """Return the golden conditions: those of the negative prompt and of the prompt."""
    text, glyphs = seeded_normal("cache/text", 2, 7, 24), seeded_normal("cache/byt5", 2, 4, 1472)
    return Condition(text[0, :4]), Condition(text[1, :6], glyphs[1, :3])


def settings(schedule, kind):
    case = CASES["schedules"][schedule]
    kept = CASES["no_cache_blocks"].get(kind, ())
    return StepCaching(
        KINDS[kind], case["total"], case["start"], case["end"], case["interval"], tuple(kept)
    )


def sample(transformer, num_steps, caching=None, **sampling):
    """Return the latents of every step of one video.

    Shape: (steps + 1, channels, frames, height, width).
    """
    negative, prompt = conditions()
    options = SamplerSettings(Guidance(3.0), **sampling)
    pipeline = GRPOPipeline(transformer, None, sampling=options, negative=negative)
    num_rows = 1 if options.batched_forward else 2
    noise = seeded_normal("cache/latents", 1, 4, 3, 4, 5)
    with step_cache(transformer, caching, num_rows) if caching else nullcontext():
        return pipeline.sample(
            Conditions((prompt,)), noise, Schedule.ode(num_steps, 5.0), None
        ).latents[0]


def difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def counted(block, run):
    """Count the calls of the forward pass of a block, which the hooks of the cache may skip."""
    forward = block.forward

    def count(*arguments):
        run.update([0])
        return forward(*arguments)

    block.forward = count


@pytest.mark.parametrize("schedule, batched", [("main", False), ("early", True)])
def test_the_trajectories_are_those_of_the_original(transformer, schedule, batched):
    golden, case = load_file(GOLDEN / "step_cache.safetensors"), CASES["schedules"][schedule]
    run = Counter()
    for block in blocks(transformer):
        counted(block, run)
    plain = sample(transformer, case["total"], batched_forward=batched)
    assert difference(plain, golden[f"{schedule}/none"]) < TOLERANCE
    for kind in KINDS:
        run.clear()
        found = sample(
            transformer, case["total"], settings(schedule, kind), batched_forward=batched
        )
        assert difference(found, golden[f"{schedule}/{kind}"]) < TOLERANCE, kind
        assert difference(found, plain) > 1e-2
        # the original runs a block whose output it does not use
        in_vain = kind == "deepcache_inner"
        skipped = case["total"] - len(case["full_steps"])
        assert run[0] == (sum(case["blocks_run"][kind]) - in_vain * skipped) * (1 if batched else 2)


def full_and_cached_step(model, latents, condition, kind, timesteps):
    """Return the cache, the velocity of the last of four full steps, and that of the cached step
    after it.
    """
    caching = StepCaching(
        kind, total_steps=5, cache_start_step=3, cache_end_step=5, cache_step_interval=2
    )
    with step_cache(model, caching) as cache:
        velocities = [
            model(latents, timestep=torch.tensor([time]), conditions=[condition])
            for time in timesteps
        ]
    return cache, *velocities[3:]


def wan(folder):
    model = load_transformer(write_wan(folder, num_layers=4), "wan2.1_t2v_1.3b")
    install(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deepcache", "teacache", "taylorcache"])
def test_a_cached_step_of_wan_equals_the_full_step_at_the_same_timestep(tmp_path, kind):
    model, condition = wan(tmp_path), Condition(seeded_normal("text", 5, 32))
    latents = seeded_normal("latents", 1, 4, 3, 4, 6)
    cache, full, cached = full_and_cached_step(model, latents, condition, kind, [700.0] * 5)
    assert torch.equal(cached, full)
    _, full, later = full_and_cached_step(
        model, latents, condition, kind, [990.0, 960.0, 920.0, 860.0, 700.0]
    )
    assert difference(later, cached) > 1e-3, "tokens of an earlier timestep"
    assert difference(later, full) > 1e-3, "the final layer reads the new timestep"
    num_tokens = latents[0, 0].numel() // 4
    _, _, images = cache.stored[0]
    assert [image.shape[1] for image in images] == [num_tokens] * (
        3 if kind == "taylorcache" else 1
    )


def test_the_default_schedule_runs_half_of_fifty_steps():
    full = [step for step in range(50) if StepCaching().is_full(step)]
    assert full == [*range(12), 15, 19, 23, 27, 31, 35, 39, 43, *range(45, 50)]
    skipped = {kind: StepCaching(kind).num_skipped(54) for kind in KINDS.values()}
    assert skipped == {"deepcache": 53, "teacache": 54, "taylorcache": 54}
    assert StepCaching(no_cache_block_id=(0, 50, 53)).num_skipped(54) == 53, (
        "blocks 0 and 50 do not affect the output"
    )


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({"total_steps": 100, "cache_start_step": 22, "cache_end_step": 90}, "total_steps"),
        ({"cache_start_step": 0, "cache_type": "taylorcache"}, "1 <= --cache_start_step"),
        ({"no_cache_block_id": (0, 1, 2, 3)}, "no_cache_block_id"),
    ],
)
def test_a_schedule_must_fit_the_steps_and_the_blocks(changes, setting):
    StepCaching(cache_start_step=0, no_cache_block_id=(0, 2, 3)).check(50, 4)
    with pytest.raises(ValueError, match=setting):
        StepCaching(**changes).check(50, 4)
