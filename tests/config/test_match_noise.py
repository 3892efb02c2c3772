"""The setting match_noise: chosen once, seen everywhere, the same when a resolved config is read again."""

import pytest
import torch

from hyvideo.config.command_line import load_config, parse
from hyvideo.config.rules import check, check_sampling
from hyvideo.config.run_plan import describe, make_plan
from hyvideo.records.run_files import write_config
from hyvideo.schedulers.noise_matching import matched_eta, total_variance
from hyvideo.schedulers.transitions import shifted_levels

FLAGS = ["--config", "configs/smoke.yaml", "--sde_type", "flow_grpo", "--match_noise", "sage_grpo:0.5"]


@pytest.fixture
def matched(tiny_config):
    """flow_grpo with the noise of sage_grpo at 0.5, at the run's own steps."""
    return tiny_config.with_settings(sde_type="flow_grpo", match_noise="sage_grpo:0.5").resolved()


def test_eta_is_chosen_for_the_runs_own_schedule(matched):
    rollout = matched.rollout
    schedule = dict(num_steps=rollout.grpo_sampling_steps, shift=rollout.shift, last_step=rollout.last_step)
    assert rollout.eta == matched_eta("sage_grpo:0.5", "flow_grpo", **schedule)
    check(matched)
    assert f"flow_grpo with eta {rollout.eta:.4g}, matched to sage_grpo:0.5" in describe(matched, make_plan(matched))


def test_the_shift_of_the_version_is_known_before_eta_is_chosen(tiny_config):
    changes = dict(shift=None, transformer_version="720p_t2v", sde_type="cps", match_noise="sage_grpo:0.5")
    config = tiny_config.with_settings(**changes).resolved()
    rollout = config.rollout
    assert rollout.shift == 9.0
    expected = matched_eta(
        "sage_grpo:0.5", "cps", num_steps=rollout.grpo_sampling_steps, shift=9.0, last_step=rollout.last_step
    )
    assert rollout.eta == expected


def test_a_resolved_config_read_again_has_the_same_eta(matched, tmp_path):
    assert matched.resolved() == matched
    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    assert load_config(tmp_path / "config.yaml") == matched
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == matched


def test_without_the_setting_eta_is_what_was_set(tiny_config):
    assert tiny_config.rollout.match_noise == "" and tiny_config.rollout.eta == 0.7


def test_an_eta_of_the_file_gives_way_and_one_of_the_command_line_is_a_contradiction(tiny_config, capsys):
    chosen = parse(FLAGS).config.rollout.eta  # smoke.yaml has an eta of its own
    assert chosen != tiny_config.rollout.eta
    assert parse([*FLAGS, "--eta", repr(chosen)]).config.rollout.eta == chosen
    assert parse([*FLAGS, "--match_noise=", "--eta=0.3"]).config.rollout.eta == 0.3
    for eta in (["--eta", "0.3"], ["--eta=0.3"]):
        with pytest.raises(SystemExit) as exit_:
            parse([*FLAGS, *eta])
        assert exit_.value.code == 2
        assert "--eta 0.3 contradicts match_noise sage_grpo:0.5, which chooses eta" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"match_noise": "sage_grpo"}, "match_noise must be <sde_type>:<eta>"),
        ({"match_noise": "flow_grpo:9", "sde_type": "cps"}, "cps reaches at most .*, at eta 1; lower the eta of flow"),
    ],
)
def test_what_cannot_be_matched_is_told_once_by_the_check(tiny_config, tmp_path, changes, said):
    config = tiny_config.with_settings(**changes).resolved()
    assert config.rollout.eta == tiny_config.rollout.eta
    with pytest.raises(ValueError, match=said) as error:
        check(config)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ValueError, match=said):
        check_sampling(config, output=tmp_path)


def test_the_program_ends_with_code_2_and_one_message(capsys, monkeypatch, tiny_config):
    import post_train

    monkeypatch.setattr("sys.argv", ["post_train.py", *FLAGS[:-1], "sage_grpo:much", "--print_config"])
    assert post_train.main() == 2
    captured = capsys.readouterr()
    assert "match_noise must be <sde_type>:<eta>" in captured.err and captured.out == ""


def test_printed_settings_have_the_chosen_eta(capsys, monkeypatch, tiny_config, tmp_path):
    import post_train

    argv = ["post_train.py", *FLAGS, "--output_dir", str(tmp_path / "new"), "--print_config"]
    monkeypatch.setattr("sys.argv", argv)
    assert post_train.main() == 0
    assert f"eta: {parse(FLAGS).config.rollout.eta}\n" in capsys.readouterr().out


def test_generate_takes_an_eta_in_place_of_the_matched_one(matched, tmp_path, monkeypatch):
    import generate

    write_config(tmp_path, matched.flat(), device=torch.device("cpu"), world_size=1)
    flags = ["--config", str(tmp_path / "config.yaml"), "--prompt", "a", "--output_path", str(tmp_path)]

    def config_of(*more):
        monkeypatch.setattr("sys.argv", ["generate.py", *flags, *more])
        return generate.config_of(generate.parse(), has_images=False)

    asked = config_of("--stochastic", "dance_grpo", "--eta", "0.3")
    assert (asked.rollout.eta, asked.rollout.match_noise) == (0.3, "")
    assert config_of("--stochastic", "flow_grpo").rollout.eta == matched.rollout.eta


@pytest.mark.parametrize("sde_type, eta", [("sage_grpo", 0.5), ("dance_grpo", 0.25)])
def test_recommended_is_the_eta_of_the_methods_own_recipe(tiny_config, sde_type, eta):
    config = tiny_config.with_settings(sde_type=sde_type, match_noise="recommended").resolved()
    check(config)
    assert config.rollout.eta == eta


def test_no_recipe_is_invented(tiny_config):
    with pytest.raises(ValueError, match="recommended is defined for sage_grpo, dance_grpo, not for cps; set eta"):
        check(tiny_config.with_settings(sde_type="cps", match_noise="recommended").resolved())


def test_the_noise_of_all_steps_is_matched_inside_a_window(tiny_config):
    changes = {"sde_type": "dance_grpo", "match_noise": "sage_grpo:0.5", "sde_window": "random:2"}
    config = tiny_config.with_settings(**changes).resolved()
    check(config)
    wanted = total_variance("sage_grpo", shifted_levels(4, 3.0), 0.5, "deterministic")
    said = describe(config, make_plan(config))
    assert f"variance {wanted:.4g}" not in said and f", mean {wanted:.4g} over its positions\n" in said


def test_a_window_that_does_not_fit_is_told_once(tiny_config):
    with pytest.raises(ValueError) as refusal:
        check(tiny_config.with_settings(match_noise="sage_grpo:0.5", sde_window="fixed:3:2").resolved())
    assert str(refusal.value).count("sde_window must contain at least 1 step and fit the 3 stochastic steps") == 1


def test_more_noise_than_cps_has_in_a_window_is_refused(tiny_config):
    changes = {"sde_type": "cps", "match_noise": "sage_grpo:0.9", "sde_window": "random:1"}
    with pytest.raises(ValueError, match=r"cps reaches at most 0\..* in sde_window random:1, at eta 1; lower the eta"):
        check(tiny_config.with_settings(**changes).resolved())
