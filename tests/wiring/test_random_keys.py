"""The keys of all random numbers: the seed, and what each draw depends on.

`STREAMS` is frozen. Another key changes every run, and a part that is missing or constant makes
draws equal that must be independent.
"""

import ast
import itertools

import pytest
import torch

from hyvideo.data import randomness
from hyvideo.data.examples import Example
from hyvideo.data.pairs import split_by_prompt
from hyvideo.data.prompts import Request
from hyvideo.generation.video_sampler import VideoSampler
from hyvideo.generation.videos import Video
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from tests.forked import ROOT
from tests.shallow import SHALLOW
from tests.training.test_reward_gradient import Contrast

CPU = torch.device("cpu")
SEED, VALIDATION_SEED = 7, 11
# No two are equal: otherwise two parts of a key could change places.
ITERATIONS, GROUPS, MEMBERS = {1, 2}, {0, 1, 2}, {0, 1, 2, 3}
STEPS, VALIDATION_STEPS, COLUMNS = {0, 1, 2, 3, 4}, {0, 1, 2}, {0, 1}
ROLLOUTS = (ITERATIONS, GROUPS, MEMBERS)
LAYERS = {
    f"{blocks}.{number}.attn.to_q"
    for blocks in ("transformer_blocks", "context_embedder.token_refiner.refiner_blocks")
    for number in (0, 1)
}
# The values of each part of a key after the seed and the name of its stream, in the runs below.
# Every combination is drawn.
STREAMS = {
    "prompt order": [{0}],  # epoch
    "initial noise": ROLLOUTS,
    "step noise": [*ROLLOUTS, STEPS],
    "sde window": [ITERATIONS],
    "visiting order": ROLLOUTS,
    "anchor turns": [ITERATIONS],
    "adapter": [{f"{layer}.lora_A.default.weight" for layer in LAYERS}],
    "noise levels": ROLLOUTS,
    "new noise": [*ROLLOUTS, COLUMNS],
    "interval ends": [*ROLLOUTS, COLUMNS],
    "levels of the schedule": [ITERATIONS],
    "held-out pairs": [],
    "validation noise": [{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1}],  # prompt and repeat
    "validation step noise": [{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1}, VALIDATION_STEPS],
}
OF_A_REQUEST_WITH_A_SEED = {
    "validation noise": [{0, 1}],  # repeat
    "validation step noise": [{0, 1}, VALIDATION_STEPS],
}
# Streams of trials, of fixed projections and of the training of rewards, which have no seed of a run.
WITHOUT_SEED = {"compile probe", "tile", "frechet features", "pairs"}

GRPO = {
    "batch_size": 12,
    "num_generations": 4,
    "grpo_sampling_steps": 6,
    "lora_rank": 2,
    "lora_target_modules": ["attn.to_q"],
    "enable_timestep_permutation": True,
    "anchor_fraction": 0.5,
    "kl_strategy": "fixed",
}
LEVELS = {
    "batch_size": 12,
    "num_generations": 4,
    "eta": 0.0,
    "grpo_sampling_steps": 3,
    "kl_strategy": "fixed",
}


@pytest.fixture
def keys(monkeypatch):
    """The keys of all random numbers that are drawn from now on."""
    found, hashing = [], randomness.hashlib

    class Recorder:
        @staticmethod
        def blake2b(key, **options):
            found.append(ast.literal_eval(key.decode()))
            return hashing.blake2b(key, **options)

    monkeypatch.setattr(randomness, "hashlib", Recorder)
    return found


@pytest.fixture
def make(tiny_config, mesh):
    """A function that returns a trainer with settings in addition to those of a small run."""

    def with_settings(**settings):
        common = {"pretrained_model_root": SHALLOW, "seed": SEED}
        common["reward_weights"] = '{"VQ": 0.5, "MQ": 2}'
        config = tiny_config.with_settings(**(common | settings))
        return Trainer(config, mesh, CPU, scorers={"test": Contrast()})

    return with_settings


def collect(trainer):
    for iteration in sorted(ITERATIONS):
        sample(trainer.run, iteration)


def check(keys, seed, *names, streams=STREAMS):
    """Assert that the streams ``names`` have exactly the keys of the table."""
    for name in names:
        found = {key for key in keys if key[1] == name}
        expected = {(seed, name, *parts) for parts in itertools.product(*streams[name])}
        assert found == expected, name


def test_every_stream_is_in_the_table():
    """The names are those in the calls of the source."""
    named = set()
    for path in (ROOT / "hyvideo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
                "normal",
                "generator",
                "permutation",
                "reference_normal",
            }:
                named |= {
                    part.value
                    for part in node.args
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
    of_validation = {"validation noise", "validation step noise"}  # the name is an argument there
    assert named == (STREAMS.keys() - of_validation) | WITHOUT_SEED | {"generate"}


def test_the_draws_of_grpo_depend_on_seed_iteration_rollout_and_step(make, keys):
    collect(make(**GRPO))
    check(keys, SEED, "prompt order", "initial noise", "step noise", "visiting order")
    check(keys, SEED, "anchor turns", "adapter")
    keys.clear()
    collect(make(sde_window="random:2", **GRPO))
    check(keys, SEED, "sde window")


def test_the_draws_of_objectives_on_noise_levels_depend_on_iteration_rollout_and_column(make, keys):
    flow_map = {"transformer_version": "miniature_flow_map", "nft_levels": 2}
    trainer = make(objective="nft", **flow_map, **LEVELS)
    for trainer.iteration in sorted(ITERATIONS):
        trainer.run_iteration()
    check(keys, SEED, "noise levels", "new noise", "interval ends")
    keys.clear()
    student = {"objective": "distill", "anchor_substeps": 2, "anchor_cfg_scale": 3.0}
    collect(make(transformer_version="miniature_flow_map", **student, **LEVELS))
    check(keys, SEED, "levels of the schedule")


def test_the_held_out_pairs_depend_on_the_seed(keys, tmp_path):
    pairs = [Example(Request(prompt), (tmp_path, tmp_path), "") for prompt in "abcd"]
    split_by_prompt(pairs, SEED)
    check(keys, SEED, "held-out pairs")


def test_the_noise_of_a_validation_depends_on_its_own_seed_prompt_repeat_and_step(make, keys):
    settings = {"validation_repeats": 2, "validation_steps": 4, "validation_batch_size": 5}
    settings |= {"valid_video_csv": "assets/miniature/prompts/smoke.csv", "validation_eta": 0.5}
    validation = make(validation_seed=VALIDATION_SEED, **settings).validation
    assert list(validation.schedule.stochastic_steps) == sorted(VALIDATION_STEPS)
    list(validation.videos(validation.rows()))
    check(keys, VALIDATION_SEED, "validation noise", "validation step noise")
    keys.clear()
    validation.requests = [Request("a red circle moves up", seed=3) for _ in range(2)]
    list(validation.videos([0, 1]))
    check(keys, 3, *OF_A_REQUEST_WITH_A_SEED, streams=OF_A_REQUEST_WITH_A_SEED)


def test_the_noise_of_a_generated_video_depends_on_seed_number_candidate_and_step(
    make, keys, tmp_path, mesh
):
    trainer = make()
    schedule = trainer.run.source.schedule
    sampler = VideoSampler(trainer.config.data, mesh, SEED, "default", on_stage=lambda *_: None)
    requests = [Request("a red circle moves up"), Request("a red circle moves up", seed=3)]
    conditions = trainer.run.encoder(requests)
    keys.clear()
    for request in requests:
        video = Video(request, 16, 16, 4, tmp_path / "0004.mp4")
        for stage in ([], ["candidate 1"]):
            sampler.sample(trainer.run.pipeline, schedule, video, conditions.select([0]), *stage)
    expected = {
        (*start, *stage, *step)
        for start in ((SEED, "generate", 4), (3, "generate", 0))
        for stage in ((), ("candidate 1",))
        for step in ((), *((step,) for step in schedule.stochastic_steps))
    }
    assert set(keys) == expected
