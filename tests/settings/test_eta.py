"""Setting eta: a number, or the noise of another sampler, from which the number follows everywhere."""

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.records.run_config import write_config
from hyvideo.report.page import eta_of
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.settings.plan_text import describe
from hyvideo.settings.sections import RolloutSettings

FLAGS = ["--config", "configs/smoke.yaml", "--sde_type", "flow_grpo"]


@pytest.fixture
def matched(tiny_config):
    """flow_grpo with the noise of sage_grpo at eta 0.5 on the steps of the run."""
    return tiny_config.with_settings(sde_type="flow_grpo", eta="sage_grpo:0.5").resolved()


def number_of(config):
    rollout = config.rollout
    return matched_eta(
        "sage_grpo:0.5",
        "flow_grpo",
        num_steps=rollout.grpo_sampling_steps,
        shift=rollout.shift,
        last_step=rollout.last_step,
    )


def test_the_sampling_has_the_number_and_the_settings_have_the_words(matched, tiny_config):
    assert number_of(matched) not in (0.5, tiny_config.rollout.eta)
    assert matched.sampling.eta == matched.eta == number_of(matched)
    assert matched.rollout.eta == "sage_grpo:0.5"
    check(matched)


def test_plan_and_report_say_both(matched):
    words = f"{matched.eta:.4g}, which has the noise of sage_grpo:0.5"
    assert words in describe(matched, make_plan(matched))
    assert eta_of(matched) == words


def test_the_report_of_a_run_whose_sampler_has_moved_has_the_words(matched, tmp_path):
    gone = matched.with_settings(sde_type=f"{tmp_path}/gone.py:own")
    assert eta_of(gone) == "with the noise of sage_grpo:0.5"


def test_a_reloaded_config_has_the_same_eta(matched, tmp_path):
    assert matched.resolved() == matched
    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    assert load_config(tmp_path / "config.yaml") == matched
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == matched


def test_the_planned_validation_has_the_number_of_the_rollouts(tiny_config):
    """Its other steps and its missing window would need another eta, or cannot have the noise."""
    config = tiny_config.with_settings(
        sde_type="cps",
        eta="sage_grpo:0.2",
        sde_window="fixed:0:2",
        valid_video_csv=["assets/prompts/valid.csv"],
        validation_steps=9,
    ).resolved()
    planned = PlannedRun(config, 1, released_sizes("480p_t2v")).validation
    assert planned.plan.sampled_branches and planned.config.rollout.eta == config.eta


def test_a_flag_replaces_the_eta_of_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("sde_type: flow_grpo\neta: sage_grpo:0.5\n")
    assert parse(["--config", str(file)]).config.rollout.eta == "sage_grpo:0.5"
    assert parse(["--config", str(file), "--eta", "0.3"]).config.sampling.eta == 0.3
    assert parse([*FLAGS, "--eta", "cps:0.1"]).config.rollout.eta == "cps:0.1"


@pytest.mark.parametrize("value, number", [("0.5", 0.5), ("1e-2", 0.01), (0, 0.0), (2, 2.0)])
def test_a_number_in_any_form_is_a_number(value, number):
    eta = RolloutSettings(eta=value).eta
    assert (eta, type(eta)) == (number, float)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eta": "flow_grpo:9", "sde_type": "cps"}, "eta flow_grpo:9 cannot be reached"),
        ({"eta": "cps:2"}, "eta must be within .* for cps"),
    ],
)
def test_an_impossible_match_is_reported_once(tiny_config, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        check(tiny_config.with_settings(**changes).resolved())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["sage_grpo", "sage_grpo:", "ddpm:0.5", "sage_grpo:-1", "nan"])
def test_an_invalid_eta_is_refused_in_one_line(text, tiny_config):
    with pytest.raises(ValueError, match="eta") as error:
        tiny_config.with_settings(eta=text)
    assert len(str(error.value).splitlines()) == 1


def test_generate_has_the_eta_of_the_run_for_its_sampler_or_that_of_its_flag(matched, tmp_path):
    import generate
    from hyvideo.generation import program

    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    flags = [
        "--config",
        str(tmp_path / "config.yaml"),
        "--prompt",
        "a",
        "--output_path",
        str(tmp_path),
    ]

    def sampling_of(*more):
        options = generate.parse([*flags, *more])
        _, sampling = program.sampling_of(options, has_images=False)
        return sampling

    assert sampling_of().eta == 0
    assert sampling_of("--stochastic", "flow_grpo").eta == matched.eta
    assert sampling_of("--stochastic", "dance_grpo", "--eta", "0.3").eta == 0.3
    dance = matched.with_settings(sde_type="dance_grpo").eta
    assert sampling_of("--stochastic", "dance_grpo").eta == dance != matched.eta


def test_more_noise_than_cps_can_add_in_a_window_raises(tiny_config):
    changes = {"sde_type": "cps", "eta": "sage_grpo:0.9", "sde_window": "random:1"}
    with pytest.raises(ValueError, match="cps in sde_window random:1"):
        check(tiny_config.with_settings(**changes).resolved())
