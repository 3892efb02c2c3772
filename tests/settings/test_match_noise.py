"""Setting match_noise: eta is matched once, used everywhere, and unchanged in a reloaded config."""

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.records.run_files import write_config
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.settings.command_line import load_config, parse

FLAGS = [
    "--config",
    "configs/smoke.yaml",
    "--sde_type",
    "flow_grpo",
    "--match_noise",
    "sage_grpo:0.5",
]


@pytest.fixture
def matched(tiny_config):
    """flow_grpo matched to sage_grpo with eta 0.5 on the steps of the run."""
    return tiny_config.with_settings(sde_type="flow_grpo", match_noise="sage_grpo:0.5").resolved()


def test_eta_is_matched_on_the_schedule_of_the_run(matched):
    rollout = matched.rollout
    schedule = dict(
        num_steps=rollout.grpo_sampling_steps, shift=rollout.shift, last_step=rollout.last_step
    )
    assert rollout.eta == matched_eta("sage_grpo:0.5", "flow_grpo", **schedule)
    check(matched)


def test_a_reloaded_config_has_the_same_eta(matched, tmp_path):
    assert matched.resolved() == matched
    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    assert load_config(tmp_path / "config.yaml") == matched
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == matched


def test_match_noise_overrides_eta_of_the_file_and_contradicts_the_flag(tiny_config, capsys):
    chosen = parse(FLAGS).config.rollout.eta  # smoke.yaml sets another eta
    assert chosen != tiny_config.rollout.eta
    assert parse([*FLAGS, "--eta", repr(chosen)]).config.rollout.eta == chosen
    assert parse([*FLAGS, "--match_noise=", "--eta=0.3"]).config.rollout.eta == 0.3
    with pytest.raises(SystemExit):
        parse([*FLAGS, "--eta", "0.3"])
    assert "--eta 0.3 contradicts match_noise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"match_noise": "sage_grpo"}, "match_noise"),
        ({"match_noise": "flow_grpo:9", "sde_type": "cps"}, "eta .* flow"),
    ],
)
def test_an_impossible_match_is_reported_once(tiny_config, changes, message):
    config = tiny_config.with_settings(**changes).resolved()
    assert config.rollout.eta == tiny_config.rollout.eta
    with pytest.raises(ValueError, match=message) as error:
        check(config)
    assert len(str(error.value).splitlines()) == 1


def test_an_eta_flag_of_generate_overrides_the_matched_one(matched, tmp_path):
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
        return program.sampling_of(options, has_images=False)

    config, sampling = sampling_of("--stochastic", "dance_grpo", "--eta", "0.3")
    assert (sampling.eta, config.rollout.match_noise) == (0.3, "")
    _, sampling = sampling_of("--stochastic", "flow_grpo")
    assert sampling.eta == matched.rollout.eta


def test_more_noise_than_cps_can_add_in_a_window_raises(tiny_config):
    changes = {"sde_type": "cps", "match_noise": "sage_grpo:0.9", "sde_window": "random:1"}
    with pytest.raises(
        ValueError,
        match="cps in sde_window random:1",
    ):
        check(tiny_config.with_settings(**changes).resolved())
