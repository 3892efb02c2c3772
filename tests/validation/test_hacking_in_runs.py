"""The reward-hacking rule in runs whose reward can be hacked."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import post_train
from hyvideo.checks.machine_rules import run_was_not_stopped
from hyvideo.checks.rules import check
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.files.run_folder import STOPPED_FOR_HACKING, RunRecord, write_record
from hyvideo.report import run_summary
from hyvideo.settings import processes
from hyvideo.settings.sections import ValidationSettings
from hyvideo.trainer import Trainer
from hyvideo.validation.held_out import (
    Dispersion,
    ValidationStats,
    Verdict,
    read_history,
    read_validation,
    write_validation,
)
from hyvideo.validation.reward_hacking import RewardHacking, after_validation
from tests.distributed.launch import launch

MODULE = "tests.validation.test_hacking_in_runs"
CPU = torch.device("cpu")
VALIDATION = {
    "valid_video_csv": "assets/miniature/prompts/smoke.csv",
    "validation_repeats": 2,
    "validation_interval": 1,
    "save_interval": 1,
    "log_num_videos": 0,
}
GREEDY = {"learning_rate": 3e-3, "kl_weight": 0.0, "max_steps": 3}


class Brightness:
    """Rewards only brightness: random weights learn it within a few updates and lose diversity."""

    def score(self, videos, prompts, *, fps):
        values = [video.float().mean().item() / 255 for video in videos]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]

    def check_prompts(self, prompts):
        pass


class Truthful(Brightness):
    """Adds held-out metrics of each video and of the set, and a score without weight."""

    def score(self, videos, prompts, *, fps):
        return [
            scores | {"CLIPScore": 2 * scores["VQ"]}
            for scores in super().score(videos, prompts, fps=fps)
        ]

    def held_out_each(self, videos, prompts):
        return [{"true/length": float(len(prompt))} for prompt in prompts]

    def features(self, videos, prompts):
        return torch.stack([video.float().mean((0, 2, 3)) / 1000 for video in videos])

    def held_out(self, features):
        return {"frechet_distance": len(features) + features.mean()}


@pytest.fixture
def greedy_config(tiny_config):
    return tiny_config.with_settings(**VALIDATION, **GREEDY)


def trainer_of(config, mesh):
    return Trainer(config, mesh, CPU, scorers={"test": Brightness()})


def latest(folder):
    return max(path.name for path in (folder / "checkpoints").iterdir())


def recorded(folder, iteration):
    return json.loads((folder / "samples" / f"{iteration:06d}" / "measures.json").read_text())


@pytest.mark.system
def test_stop_saves_the_policy_and_stops_the_run(greedy_config, mesh, tmp_path):
    config = greedy_config.with_settings(on_reward_hacking="stop", save_interval=3)
    with pytest.raises(
        RewardHacking,
        match="held_out/diversity",
    ):
        trainer_of(config, mesh).train()
    run = tmp_path / "run"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation/hacking"] == 1 and latest(run) == f"{last['iteration']:06d}"
    assert (
        json.loads((run / STOPPED_FOR_HACKING).read_text())["departures"]
        == recorded(run, last["iteration"])["hacking"]
    )

    # A launcher that restarts failed runs must not resume training; a user can, with warn.
    again = config.with_settings(max_steps=last["iteration"] + 1)
    with pytest.raises(ValueError, match="reward_hacking.json"):
        check(again)
    warned = again.with_settings(on_reward_hacking="warn")
    assert not [*run_was_not_stopped(warned.validation, warned.record.output_dir)]
    # The history survives the resume: the next validation is compared with the base validation of
    # the first run.
    with pytest.raises(RewardHacking, match=f"at iteration {last['iteration'] + 1}"):
        trainer_of(again, mesh).train()


def test_scores_without_weight_are_monitored_with_their_spread(greedy_config, mesh):
    weights = {"reward_weights": '{"VQ": 1, "MQ": 0}'}
    trainer = Trainer(
        greedy_config.with_settings(**weights), mesh, CPU, scorers={"test": Truthful()}
    )
    numbers = trainer.validation.run(0)
    (recorded_stats,) = read_history(
        trainer.validation.output, trainer.validation.made_with, before=1
    )
    assert numbers["validation/CLIPScore"] == pytest.approx(2 * numbers["validation/VQ"])
    watched = {
        "CLIPScore",
        "MQ",
        "TA",
        "true/length",
        "reward",
        "held_out/exposure",
    }
    assert watched <= recorded_stats.spreads.keys()
    assert not {"VQ", "frechet_distance"} & recorded_stats.spreads.keys()
    assert 16 < numbers["validation/frechet_distance"] < 17  # called once, with all videos
    assert recorded_stats.spreads["CLIPScore"].std == pytest.approx(
        2 * recorded_stats.spreads["reward"].std
    )
    assert (
        recorded_stats.spreads["CLIPScore"].count == 16
        and recorded_stats.spreads["held_out/diversity"].count == 8
    )


@pytest.mark.parametrize("ended, code", [(None, 0), (RewardHacking("reward up, motion down"), 3)])
def test_the_program_exits_with_code_3(greedy_config, mesh, monkeypatch, capsys, ended, code):
    class Ended:
        plan, policy, device, output_dir = None, SimpleNamespace(parameters=[]), CPU, Path()
        iteration, resumed, validation, state = 0, False, None, SimpleNamespace(changed_settings=[])

        def __init__(self):
            self.mesh, self.config = mesh, greedy_config

        def train(self):
            if ended:
                raise ended

    monkeypatch.setattr(post_train, "build", lambda *_: Ended())
    monkeypatch.setattr(post_train, "print_built", lambda *_: None)
    monkeypatch.setattr(run_summary, "print_summary", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["post_train.py", "--config", "configs/smoke.yaml"])
    assert post_train.main() == code
    assert ("reward up, motion down" in capsys.readouterr().err) == (code == 3)


def test_settings_that_prevent_monitoring_are_rejected(greedy_config):
    with pytest.raises(ValueError, match="on_reward_hacking"):
        check(greedy_config.with_settings(on_reward_hacking="stop", valid_video_csv=""))


# --- several ranks --------------------------------------------------------------------------------


def test_validations_with_other_settings_are_ignored(tiny_config, mesh, tmp_path, capsys):
    """With other steps, or other prompts in the same file, videos differ for reasons other than
    training.
    """
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\na red circle moves up\na blue square moves left\n")
    config = tiny_config.with_settings(**VALIDATION | {"valid_video_csv": str(prompts)})
    first = trainer_of(config, mesh)
    write_record(first.output_dir, RunRecord(run=first.start.run))
    first.validation.run(0)
    other = trainer_of(
        config.with_settings(validation_steps=config.validation.validation_steps - 1), mesh
    ).validation
    assert trainer_of(config, mesh).validation.measures(0) and not other.measures(0)
    prompts.write_text("prompt\na red circle moves up\na green square moves left\n")
    assert not trainer_of(config, mesh).validation.measures(0)
    assert math.isnan(other.run(1)["validation/hacking"])
    assert "has no validation of the base model with these settings" in capsys.readouterr().err


def stats_of(iteration, count=96, std=0.1, **means):
    return ValidationStats(iteration, means, {name: Dispersion(std, count) for name in means})


def check_validation(folder, mesh, now, made_with=None, action="stop"):
    settings = ValidationSettings(on_reward_hacking=action, hacking_threshold=1.5)
    return after_validation(now, folder / "samples", made_with or {}, settings, mesh, weights={})


def test_every_validation_is_judged_by_itself(tmp_path, mesh, capsys):
    base = tmp_path / "samples" / "000000"
    base.mkdir(parents=True)
    write_validation(base, stats_of(0, reward=1.0, motion=1.0), Verdict(), {})
    for iteration, motion, is_hacked in ((10, 0.0, True), (20, 1.0, False), (30, 0.0, True)):
        verdict = check_validation(tmp_path, mesh, stats_of(iteration, reward=2.0, motion=motion))
        assert verdict.metrics["validation/hacking"] == is_hacked
        assert (verdict.ends_run, bool(verdict.reason), len(verdict.departures)) == (
            is_hacked,
            is_hacked,
            is_hacked,
        )
    assert capsys.readouterr().err.count("reward hacking at iteration") == 2


def check_with_broken_records(folder):
    """Return this rank's verdict on a validation with a partly broken history."""
    mesh = ranks.start(1, CPU) if processes.world_size() > 1 else Mesh.single()
    now = stats_of(20, reward=2.0, motion=0.0)
    verdict = check_validation(Path(folder), mesh, now, {"seed": 1}, action="warn")
    hacking = verdict.metrics["validation/hacking"]
    return hacking, [shift.name for shift in verdict.departures]


def test_broken_records_are_skipped_with_a_warning(tmp_path, capsys):
    samples = tmp_path / "samples"
    for iteration in (0, 10):
        (samples / f"{iteration:06d}").mkdir(parents=True)
    base = stats_of(0, reward=1.0, motion=1.0)
    write_validation(samples / "000000", base, Verdict(), {"seed": 1})
    (samples / "000010" / "measures.json").write_text("[1]")
    assert check_with_broken_records(tmp_path) == (1.0, ["motion"])
    assert "000010/measures.json cannot be read" in capsys.readouterr().err
    (samples / "000000" / "measures.json").write_text("[1]")
    hacking, shifts = check_with_broken_records(tmp_path)
    assert math.isnan(hacking) and shifts == []
    assert "no validation of the base model" in capsys.readouterr().err
    assert read_validation(samples / "000000", {"seed": 1}) is None


def test_a_broken_record_does_not_stop_any_rank(tmp_path):
    """Only the main rank reads the history; an unreadable record must not leave the other ranks
    waiting.
    """
    (tmp_path / "samples" / "000000").mkdir(parents=True)
    (tmp_path / "samples" / "000000" / "measures.json").write_text("")
    results = launch(f"{MODULE}:check_with_broken_records", 2, str(tmp_path), timeout=60)
    assert all(math.isnan(hacking) and shifts == [] for hacking, shifts in results)
