"""The plan that --print_config prints."""

from pathlib import Path

import pytest

import post_train
from hyvideo.files.text import lines_of
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.hours import whole_run
from hyvideo.planning.memory import memory
from hyvideo.planning.plan import length_rows, plan_lines, steps_table
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
from hyvideo.settings.run_inputs import RunInputs

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", "configs/hunyuanvideo15_480p_8gpu.yaml")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def print_config(capsys, monkeypatch):
    """Exit code and output of ``post_train.py --print_config`` with the given flags."""

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["post_train.py", *flags, "--print_config"])
        code = post_train.main()
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def planned(name="paper/table2_b_8gpu", world_size=8, hardware=None, **changes):
    config = load_config(f"configs/{name}.yaml", **changes)
    sizes = released_sizes("480p_t2v")
    return PlannedRun(config, world_size, sizes, hardware=hardware or Hardware())


def length_lines(run):
    return lines_of(length_rows(run))


def test_a_plan_says_what_runs_whether_it_fits_how_long_it_takes_and_what_is_missing(print_config):
    code, text = print_config(*CONFIG, "--gpu", "H100", "--world_size", "8")
    assert code == 0
    for words in (
        "8.33 B parameters",
        "248 TFLOP for 18,018 video tokens and 300 text tokens",
        "NPROC=8 bash run_post_train.sh --config configs/",
        "of 79.1 GiB",
        "pretrained_model_root",
    ):
        assert words in text
    assert "\nfits: " in text


def test_a_run_that_does_not_fit_gets_one_command_that_does(print_config):
    flags = ("--activation_checkpointing", "none", "--gpu_memory", "60", "--world_size", "8")
    _, text = print_config(*CONFIG, *flags)
    commands = [line for line in text.splitlines() if line.startswith("command ")]
    assert len(commands) == 1 and "--activation_checkpointing full" in commands[0]
    assert "\ntoo large: " in text and "; the command above fits" in text


def test_a_plan_of_wrong_settings_names_them_and_has_exit_code_2(print_config):
    code, text = print_config(*CONFIG, "--gpu", "H20")
    assert code == 2 and "gpu must be" in text


def test_a_missing_transformer_has_no_plan(tmp_path):
    config = planned(pretrained_model_root=str(tmp_path), transformer_version="mine").config
    assert plan_lines(RunInputs(config, 8), "auto") == []


def test_a_run_longer_than_a_week_warns_with_the_iterations_of_a_week():
    run = planned("hunyuanvideo15_480p_8gpu", valid_video_csv="", max_steps=10_000)
    (warning,) = [line for line in length_lines(run) if "WARNING" in line]
    in_a_week = int(warning.split("a week is ")[1].split()[0].replace(",", ""))
    assert whole_run(run.with_settings(max_steps=in_a_week)).seconds == pytest.approx(
        7 * 24 * 3600, rel=1e-3
    )
    shorter = run.with_settings(max_steps=int(0.999 * in_a_week))
    assert "WARNING" not in "".join(length_lines(shorter))


def test_a_validation_of_longer_videos_needs_more_memory_than_the_rollouts():
    full = {"activation_checkpointing": "full"}
    with_validation, without = (
        memory(planned(**full, **changes)) for changes in ({}, {"valid_video_csv": ""})
    )
    assert with_validation.total("validation") > without.total("decode")
    assert "validation" not in without.phases


def test_the_table_of_steps_has_the_noise_and_weights_of_the_window():
    sampling = Config().with_settings(grpo_sampling_steps=4, shift=3.0, eta=0.7).sampling
    made = sampling.schedule()
    _, *lines = (line.split() for line in steps_table(sampling, "fixed:1:2"))
    in_window = made.with_noise_only_at([1, 2])
    assert [float(line[2]) for line in lines] == pytest.approx(
        [step.std for step in in_window.transitions], abs=1e-4
    )
    assert [float(line[3]) for line in lines] == pytest.approx(
        in_window.equalizer_weights.tolist(), rel=1e-3
    )


def test_the_time_on_a_cpu_follows_the_size_and_a_size_far_from_the_model_is_a_warning():
    def lines(**size):
        config = load_config("configs/miniature.yaml", **size)
        return "\n".join(plan_lines(RunInputs(config), "cpu"))

    own, larger = lines(), lines(height=480, width=832)
    assert "about 2 minutes" in own and "WARNING" not in own
    assert " days on two idle CPU cores" in larger and "WARNING" in larger
    assert "WARNING" not in lines(height=64, width=64)  # 4 times as many tokens
