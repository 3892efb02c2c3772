"""Setting sigmas: the noise levels of rollouts, validation, generation and plan, instead of those
of the shift.
"""

import ast

import pytest
import torch

import generate
from hyvideo.checks.rules import check
from hyvideo.generation import program
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.schedulers.noise_matching import total_variance
from hyvideo.schedulers.transitions import schedule
from hyvideo.settings.identity import evaluation_settings
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from tests.shallow import SHALLOW
from tests.test_trainer import Redness
from tests.training.test_run_state import train_iterations

CPU = torch.device("cpu")
SIGMAS = "1,0.757,0.522"
LEVELS = (1.0, 0.757, 0.522, 0.0)
THREE = {"sigmas": SIGMAS, "grpo_sampling_steps": 3}


def generated(*flags):
    """Return how generate.py samples a video."""
    return program.sampling_of(generate.parse(["--prompt", "a", *flags]), has_images=False)[1]


def test_rollouts_and_validation_sample_at_the_given_levels(tiny_config, mesh):
    settings = THREE | {"validation_steps": 3, "pretrained_model_root": SHALLOW, "gate_interval": 1}
    config = tiny_config.with_settings(
        **settings, valid_video_csv="assets/miniature/prompts/smoke.csv"
    )
    check(config)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    assert trainer.run.source.schedule.sigmas == trainer.validation.schedule.sigmas == LEVELS
    assert trainer.validation.made_with["sigmas"] == SIGMAS
    seen = []
    trainer.run.policy.transformer.register_forward_pre_hook(
        lambda module, inputs, options: seen.append(options["timestep"][0].item()), with_kwargs=True
    )
    trainer.iteration = 1
    rollouts, _ = sample(trainer.run, 1)
    assert seen == [1000.0, 757.0, 522.0]
    # Each step is that of the sampler between these levels.
    expected = schedule(
        config.rollout.sde_type, LEVELS, config.rollout.eta, config.rollout.last_step
    )
    assert rollouts.schedule.transitions == config.sampling.transitions() == expected


def test_grpo_trains_the_sampler_that_adds_new_noise_at_the_levels_of_a_student(tiny_config, mesh):
    """Rollout and update compute the same log-probabilities, so that the first ratio is 1."""
    sampler = {
        "sde_type": "cps",
        "eta": 1.0,
        "last_step": "deterministic",
        "sde_window": "random:1",
    }
    config = tiny_config.with_settings(
        **THREE, **sampler, pretrained_model_root=SHALLOW, learning_rate=1e-3
    )
    check(config)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    steps = set()
    for line in train_iterations(trainer, 3):
        assert float(line["policy/ratio_first_deviation"]) <= 1e-6 and float(line["grad/norm"]) > 0
        values = ast.literal_eval(line["by_step/ratio_mean"])
        steps |= {step for step, value in enumerate(values) if value is not None}
    assert steps <= {0, 1} and steps  # the last step takes the mean


def test_a_validation_of_another_number_of_steps_or_another_shift_uses_the_shift(tiny_config):
    config = tiny_config.with_settings(**THREE, validation_steps=3)
    assert config.validation_sampling.sigmas == SIGMAS
    for others in ({"validation_steps": 8}, {"validation_shift": 3.0}):
        changed = config.with_settings(**others)
        assert changed.validation_sampling.sigmas is None
        # Rollouts with other levels do not change such an evaluation.
        without = changed.with_settings(sigmas=None)
        assert evaluation_settings(changed) == evaluation_settings(without)
    without = config.with_settings(sigmas=None)
    assert evaluation_settings(config) != evaluation_settings(without)


def test_the_number_of_validation_steps_is_that_of_the_levels_unless_it_is_given(tiny_config):
    config = tiny_config.with_settings(**THREE, validation_steps=None)
    assert config.resolved().validation.validation_steps == 3
    assert config.with_settings(sigmas=None).resolved().validation.validation_steps == 40


@pytest.mark.parametrize("sigmas", ["1,x", "0.9,0.5,0.2", "1,0.5,0.6", "1,0.5,0", "1,0.5"])
def test_levels_that_cannot_be_sampled_raise_an_error(tiny_config, sigmas):
    config = tiny_config.with_settings(**THREE)
    check(config)
    with pytest.raises(ValueError, match="sigmas"):
        check(config.with_settings(sigmas=sigmas))


def test_plan_and_planner_count_the_guided_steps_of_the_levels(tiny_config):
    settings = THREE | {"cfg_scale": 3.0, "guidance_interval": "0.7:0.9"}
    config = tiny_config.with_settings(
        **settings, valid_video_csv="assets/miniature/prompts/smoke.csv"
    )
    assert config.sampling.branches() == [1, 2, 1]
    assert config.with_settings(sigmas=None, shift=1.0).sampling.branches() == [1, 1, 1]
    run = PlannedRun(config.with_settings(validation_steps=3), 1, released_sizes("480p_t2v"))
    assert run.plan.sampled_branches == run.validation.plan.sampled_branches == 4 / 3
    other = PlannedRun(
        config.with_settings(validation_steps=9, shift=1.0), 1, released_sizes("480p_t2v")
    )
    assert other.validation.plan.sampled_branches == 11 / 9  # the levels 8/9 and 7/9 are guided


def test_noise_is_matched_at_the_levels(tiny_config):
    config = tiny_config.with_settings(**THREE, sde_type="cps", eta="sage_grpo:0.3").resolved()
    goal = total_variance("sage_grpo", LEVELS, 0.3, config.rollout.last_step)
    assert total_variance(
        "cps", LEVELS, config.sampling.eta, config.rollout.last_step
    ) == pytest.approx(goal)


def test_generation_uses_the_levels_of_a_run_or_of_its_flag(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(f"transformer_version: 480p_t2v\nsigmas: {SIGMAS}\ngrpo_sampling_steps: 3\n")

    def schedule_of(*flags):
        sampling = generated(*flags)
        assert len(sampling.transitions()) == sampling.steps
        return sampling.sigmas or None, sampling.steps

    of_run = ("--config", str(own))
    assert schedule_of(*of_run) == schedule_of(*of_run, "--stochastic", "cps") == (SIGMAS, 3)
    assert schedule_of(*of_run, "--num_inference_steps", "8") == (None, 8)
    assert schedule_of(
        *of_run, "--num_inference_steps", "8", "--stochastic", "cps", "--eta", "1"
    ) == (None, 8)
    assert schedule_of(*of_run, "--shift", "7") == (None, 50)
    assert schedule_of(*of_run, "--sigmas", "1,0.5") == ("1,0.5", 2)
    assert schedule_of("--transformer_version", "480p_t2v", "--sigmas", "1,0.5") == ("1,0.5", 2)
    with pytest.raises(ValueError, match="sigmas"):
        schedule_of(
            "--transformer_version", "480p_t2v", "--sigmas", "1,0.5", "--num_inference_steps", "8"
        )
