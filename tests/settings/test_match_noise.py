"""Setting match_noise: eta is matched once, used everywhere, and unchanged in a reloaded config."""

import pytest
import torch

from hyvideo.records.run_files import write_config
from hyvideo.schedulers.noise_matching import matched_eta, total_variance
from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.settings.plan_text import describe
from hyvideo.settings.rules import check

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
    assert f"flow_grpo with eta {rollout.eta:.4g}, matched to sage_grpo:0.5" in describe(
        matched, make_plan(matched)
    )


def test_the_shift_of_the_version_is_set_before_eta_is_matched(tiny_config):
    changes = dict(
        shift=None, transformer_version="720p_t2v", sde_type="cps", match_noise="sage_grpo:0.5"
    )
    config = tiny_config.with_settings(**changes).resolved()
    rollout = config.rollout
    assert rollout.shift == 9.0
    expected = matched_eta(
        "sage_grpo:0.5",
        "cps",
        num_steps=rollout.grpo_sampling_steps,
        shift=9.0,
        last_step=rollout.last_step,
    )
    assert rollout.eta == expected


def test_a_reloaded_config_has_the_same_eta(matched, tmp_path):
    assert matched.resolved() == matched
    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    assert load_config(tmp_path / "config.yaml") == matched
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == matched


def test_without_match_noise_eta_is_unchanged(tiny_config):
    assert tiny_config.rollout.match_noise == "" and tiny_config.rollout.eta == 0.7


def test_match_noise_overrides_eta_of_the_file_and_contradicts_the_flag(tiny_config, capsys):
    chosen = parse(FLAGS).config.rollout.eta  # smoke.yaml sets another eta
    assert chosen != tiny_config.rollout.eta
    assert parse([*FLAGS, "--eta", repr(chosen)]).config.rollout.eta == chosen
    assert parse([*FLAGS, "--match_noise=", "--eta=0.3"]).config.rollout.eta == 0.3
    for eta in (["--eta", "0.3"], ["--eta=0.3"]):
        with pytest.raises(SystemExit) as exit_:
            parse([*FLAGS, *eta])
        assert exit_.value.code == 2
        assert (
            "--eta 0.3 contradicts match_noise sage_grpo:0.5, which sets eta to"
            in capsys.readouterr().err
        )


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


def test_post_train_exits_with_code_2_and_one_message(capsys, monkeypatch, tiny_config):
    import post_train

    monkeypatch.setattr(
        "sys.argv", ["post_train.py", *FLAGS[:-1], "sage_grpo:much", "--print_config"]
    )
    assert post_train.main() == 2
    captured = capsys.readouterr()
    assert "match_noise must be <sde_type>:<eta>" in captured.err and captured.out == ""


def test_print_config_shows_the_matched_eta(capsys, monkeypatch, tiny_config, tmp_path):
    import post_train

    argv = ["post_train.py", *FLAGS, "--output_dir", str(tmp_path / "new"), "--print_config"]
    monkeypatch.setattr("sys.argv", argv)
    assert post_train.main() == 0
    assert f"eta: {parse(FLAGS).config.rollout.eta}\n" in capsys.readouterr().out


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


def test_a_window_is_matched_by_the_noise_of_all_steps(tiny_config):
    changes = {"sde_type": "dance_grpo", "match_noise": "sage_grpo:0.5", "sde_window": "random:2"}
    config = tiny_config.with_settings(**changes).resolved()
    check(config)
    wanted = total_variance("sage_grpo", shifted_levels(4, 3.0), 0.5, "deterministic")
    message = describe(config, make_plan(config))
    assert (
        f"variance {wanted:.4g}" not in message
        and f", mean {wanted:.4g} over its positions\n" in message
    )


def test_a_window_that_does_not_fit_is_reported_once(tiny_config):
    with pytest.raises(ValueError) as error:
        check(
            tiny_config.with_settings(
                match_noise="sage_grpo:0.5", sde_window="fixed:3:2"
            ).resolved()
        )
    assert str(error.value).count("sde_window must fit the 3 stochastic steps") == 1


def test_more_noise_than_cps_can_add_in_a_window_raises(tiny_config):
    changes = {"sde_type": "cps", "match_noise": "sage_grpo:0.9", "sde_window": "random:1"}
    with pytest.raises(
        ValueError,
        match=r"variance of cps in sde_window random:1 is at most 0\..*, at eta 1; lower",
    ):
        check(tiny_config.with_settings(**changes).resolved())
