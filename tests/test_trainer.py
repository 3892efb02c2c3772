"""The training loop on random weights of the real classes: invariants of GRPO, the trust region,
and output files.
"""

import csv
import json
import math

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.hours import forwards_per_rollout
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.records.metric_table import find
from hyvideo.report.run_summary import print_summary
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.trainer import Trainer
from tests.conftest import small_config
from tests.forked import ROOT

CPU = torch.device("cpu")
TIMING = ("time/", "memory/", "perf/")


@pytest.fixture
def tiny_config(tiny_config):
    """Settings with three steps, of which two are trained."""
    return tiny_config.with_settings(grpo_sampling_steps=3)


class Redness:
    """Rewards red minus blue, which random weights can learn in seconds."""

    def score(self, videos, prompts, *, fps):
        values = [
            (video[:, 0].float() - video[:, 2].float()).mean().item() / 255 for video in videos
        ]
        return [{"VQ": value, "MQ": value, "TA": value} for value in values]

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}


class FirstMissing(Redness):
    """Returns NaN for the first video of every batch."""

    def score(self, videos, prompts, *, fps):
        first, *others = super().score(videos, prompts, fps=fps)
        return [first | {"TA": math.nan}, *others]


def run(config, mesh, iterations=1, scorer=None):
    """Return the metrics of the first iterations of a new trainer, and the trainer."""
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer or Redness()})
    history = []
    for _ in range(iterations):
        trainer.iteration += 1
        history.append(trainer.run_iteration())
    return history, trainer


@pytest.fixture(scope="module")
def two_iterations(tmp_path_factory):
    """Metrics of two iterations with the settings of `tiny_config`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = small_config(tmp_path_factory.mktemp("run")).with_settings(grpo_sampling_steps=3)
        return run(config, Mesh.single(), iterations=2)[0]


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.run.policy.parameters]


def first_prompt(trainer):
    """Return the prompt of the iteration's first rollout."""
    return trainer.run.source.choose(trainer.iteration).requests[0].prompt


def without_times(line):
    return {name: value for name, value in line.items() if not name.startswith(TIMING)}


def without_a_row(names):
    """Return the metrics that the table of metrics does not have; of the forms with ``<dimension>``
    and ``<stage>`` it has those of these scorers and stages only.
    """
    allowed = {"VQ", "MQ", "TA", "seen", "rollout", "decode", "anchor", "update", "iteration"}
    found = {name: find(name) for name in names}
    return [
        name
        for name, row in found.items()
        if row is None or (row.metric.name != name and not set(row.label.split()) <= allowed)
    ]


# --- invariants of GRPO ---------------------------------------------------------------------------


def test_the_first_ratio_of_fresh_rollouts_is_exactly_one(two_iterations):
    metrics = two_iterations[0]
    assert metrics["policy/ratio_max_deviation"] == 0
    assert metrics["policy/ratio_mean"] == 1
    assert metrics["kl/velocity"] == 0


def test_ratios_differ_from_one_in_a_second_update(tiny_config, mesh):
    config = tiny_config.with_settings(num_updates_per_rollout=2, learning_rate=1e-3)
    history, trainer = run(config, mesh)
    assert trainer.run.update.update_count == 2
    # The two updates train different groups, so that the second sees the change made by the first.
    assert (
        history[0]["policy/ratio_first_deviation"]
        < 1e-6
        < 1e-5
        < history[0]["policy/ratio_max_deviation"]
    )
    *trained, last = history[0]["by_step/ratio_max_deviation"]  # the last step is deterministic
    assert last is None and max(trained) == pytest.approx(
        history[0]["policy/ratio_max_deviation"], rel=1e-6
    )
    means = history[0]["by_step/ratio_mean"][:-1]
    assert sum(means) / 2 == pytest.approx(history[0]["policy/ratio_mean"], rel=1e-6)


@pytest.mark.system
def test_a_run_writes_its_report_and_continues_if_it_cannot(tiny_config, mesh, capsys):
    config = tiny_config.with_settings(report=True, max_steps=2, validation_interval=1)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    page = trainer.output_dir / "report.html"
    page.mkdir(parents=True)
    (page / "in the way").touch()
    trainer.train()
    # of two iterations, and at the end
    assert capsys.readouterr().err.count("report.html NOT WRITTEN") == 3
    (page / "in the way").unlink()
    page.rmdir()
    trainer._report()
    assert "2 iterations, 16 videos" in page.read_text()
    timeline = json.loads((trainer.output_dir / "timeline.json").read_text())
    ends = {stage: end for stage, start, end in timeline["spans"] if 0 <= start <= end}
    assert {"rollout", "decode", "scoring", "anchor", "update", "save"} <= ends.keys() and timeline[
        "iteration"
    ] == 2
    # the thread starts to write within `save`
    assert ends["update"] <= ends["save"] <= ends["writing"] + 0.1
    page.unlink()
    trainer.config = tiny_config
    trainer._report()
    assert not page.exists()


def test_the_reward_rises(tiny_config, mesh):
    config = tiny_config.with_settings(
        num_generations=8,
        learning_rate=4e-3,
    )
    history, _ = run(config, mesh, iterations=8)
    rewards = [metrics["reward/mean"] for metrics in history]
    group_std = history[0]["reward/std"]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 2 * group_std


def test_two_runs_with_the_same_seed_are_equal_bit_for_bit(tiny_config, mesh, two_iterations):
    again, _ = run(tiny_config, mesh, iterations=2)
    assert [*map(without_times, two_iterations)] == [*map(without_times, again)]


def test_rollouts_do_not_depend_on_the_batch_size(tiny_config, mesh, two_iterations):
    whole = two_iterations
    parts, _ = run(tiny_config.with_settings(batch_size=4, gradient_accumulation_steps=2), mesh)
    for name in ("reward/mean", "reward/std", "policy/log_prob", "grad/norm"):
        assert parts[0][name] == pytest.approx(whole[0][name], rel=1e-3), name


def test_the_metrics_have_the_learning_rate_and_coefficient_of_the_update(tiny_config, mesh):
    config = tiny_config.with_settings(warmup_steps=4, learning_rate=1e-3, kl_warmup_updates=4)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    for update in range(3):
        coefficient = trainer.run.update.kl_coefficient.value
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        assert (
            metrics["lr"]
            == trainer.run.policy.optimizers.optimizers[0].param_groups[0]["lr"]
            == pytest.approx(1e-3 * (update + 1) / 4)
        )
        assert metrics["kl/coef"] == coefficient


# --- trust region ---------------------------------------------------------------------------------


def test_the_anchor_needs_no_forward_pass_while_it_equals_the_policy(tiny_config, mesh):
    config = tiny_config.with_settings(update_ref_model_step=1)
    history, trainer = run(config, mesh, iterations=2)
    plan = make_plan(config)
    rollout_and_training = 3 + 3 * plan.num_trained_steps
    assert [line["cost/forwards"] for line in history] == [rollout_and_training] * 2
    assert all(line["kl/position"] == 0 for line in history)
    assert trainer.run.policy.anchor.age == 0


def test_steps_outside_the_guidance_interval_cost_one_branch_in_rollout_update_and_anchor(
    tiny_config, mesh
):
    guided = {
        "grpo_sampling_steps": 4,
        "cfg_scale": 2.0,
        "guidance_interval": "0.6:0.95",
        "kl_strategy": "dual_fixed",
        "learning_rate": 1e-3,
    }
    config = tiny_config.with_settings(**guided)
    history, trainer = run(config, mesh, iterations=2)
    # sigma 1, 0.9, 0.75 and 0.5; the last step is not trained
    rollout, trained = 1 + 2 + 2 + 1, 1 + 2 + 2
    assert [line["cost/forwards"] for line in history] == [
        rollout + 3 * trained,
        rollout + 3 * trained + trained,
    ]
    planned = PlannedRun(trainer.config, 1, read_architecture("assets/miniature", "miniature"))
    assert forwards_per_rollout(planned) == pytest.approx(history[1]["cost/forwards"])
    assert history[0]["policy/ratio_max_deviation"] < 1e-6


@pytest.mark.parametrize(
    "strategy, kl_velocity",
    [
        ("none", "log_ratio"),
        ("stepwise", "log_ratio"),
        ("dual_moving", "log_ratio"),
        ("dual_moving", "gaussian"),
    ],
)
def test_every_kl_strategy_trains(tiny_config, mesh, strategy, kl_velocity):
    kl = {"kl_weight": 0.0} if strategy == "none" else {"kl_strategy": strategy}
    history, trainer = run(
        tiny_config.with_settings(kl_velocity=kl_velocity, **kl), mesh, iterations=2
    )
    assert math.isfinite(history[1]["loss/total"]) and history[1]["grad/norm"] > 0
    assert (trainer.run.policy.anchor is None) == (strategy in ("none", "stepwise"))


# --- missing rewards ------------------------------------------------------------------------------


def test_a_rollout_without_reward_is_left_out_and_counted(tiny_config, mesh, two_iterations):
    (metrics,), _ = run(tiny_config, mesh, scorer=FirstMissing())
    full = two_iterations[0]
    assert metrics["reward/missing"] == 1
    assert math.isfinite(metrics["loss/policy"]) and metrics["grad/norm"] != full["grad/norm"]
    assert metrics["cost/forwards"] < full["cost/forwards"]


class FailsForPrompts(Redness):
    """Raises RuntimeError for the prompts in ``fails_for``."""

    fails_for = ()

    def score(self, videos, prompts, *, fps):
        if any(prompt in self.fails_for for prompt in prompts):
            raise RuntimeError("no score")
        return super().score(videos, prompts, fps=fps)


def test_an_update_without_rewards_is_skipped_and_the_anchor_age_stays_correct(tiny_config, mesh):
    """After one update instead of two, the anchor is refreshed an iteration later."""
    config = tiny_config.with_settings(
        num_updates_per_rollout=2,
        update_ref_model_step=2,
        learning_rate=1e-3,
        max_missing_fraction=0.5,
    )
    scorer = FailsForPrompts()
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    trainer.iteration = 1
    scorer.fails_for = (first_prompt(trainer),)
    lines = [trainer.run_iteration()]
    scorer.fails_for = ()
    for _ in range(2):
        trainer.iteration += 1
        lines.append(trainer.run_iteration())
    assert lines[0]["reward/missing"] == 4 and trainer.run.update.update_count == 5
    assert [line["anchor/age"] for line in lines] == [1, 0, 0]
    assert lines[0]["kl/position"] < 1e-12 < lines[1]["kl/position"]


def test_too_many_missing_rewards_stop_the_run_and_their_videos_are_saved(
    tiny_config, mesh, tmp_path
):
    scorer = FailsForPrompts()
    config = tiny_config.with_settings(log_video_interval=100, max_missing_fraction=0.25)
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    trainer.iteration = 1
    scorer.fails_for = (first_prompt(trainer),)
    before = weights(trainer)
    with pytest.raises(
        RuntimeError,
        match="4 of 8 rewards of iteration 1 are missing.*test: RuntimeError: no score",
    ):
        trainer.run_iteration()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer)))
    entries = json.loads((tmp_path / "run" / "rollouts" / "000001" / "scores.json").read_text())
    missing = [entry for entry in entries if entry["missing"]]
    assert len(entries) == 8 and len(missing) == 4
    for entry in missing:
        assert entry["reward"] is None and "no score" in entry["reason"]
        assert (tmp_path / "run" / "rollouts" / "000001" / entry["file"]).is_file()


def test_a_video_with_nan_has_a_missing_reward(tiny_config, mesh, monkeypatch):
    trainer = Trainer(tiny_config, mesh, CPU, scorers={"test": Redness()})
    decode = trainer.run.pipeline.decode

    def decode_nan(latents, **options):
        latents = latents.clone()
        latents[0] = math.nan
        return decode(latents, **options)

    monkeypatch.setattr(trainer.run.pipeline, "decode", decode_nan)
    trainer.iteration = 1
    assert trainer.run_iteration()["reward/missing"] == 1


# --- output files ---------------------------------------------------------------------------------


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_the_documented_files(tiny_config, mesh, tmp_path, capsys):
    config = tiny_config.with_settings(
        valid_video_csv="assets/miniature/prompts/smoke.csv",
        validation_steps=2,
        max_steps=2,
        save_interval=1,
        log_video_interval=2,
        log_num_videos=2,
        report_to=["tensorboard"],
    )
    trainer = Trainer(config, mesh, CPU)
    trainer.train()
    out = tmp_path / "run"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "rollouts/000002/scores.json",
        "samples/000000/000.mp4",
    ):
        assert (out / name).exists(), name
    assert (out / "checkpoints/000002").is_dir() and (out / "run.json").is_file()
    entries = json.loads((out / "rollouts/000002/scores.json").read_text())
    assert (
        len(entries) == 8
        and {"prompt", "file", "reward", "VQ", "Overall", "missing"} <= entries[0].keys()
    )
    keys = [
        (entry["seed"], entry["iteration"], entry["group"], entry["member"]) for entry in entries
    ]
    assert keys == [
        (config.data.seed, 2, group, member) for group in range(2) for member in range(4)
    ], "the keys of the noise"
    assert {"reward/Overall", "validation/Overall"} <= lines(out)[2].keys(), (
        "the same names in files and metrics"
    )
    base, _, last = lines(out)
    assert (base["iteration"], last["iteration"]) == (0, 2) and base.keys() <= last.keys() - {
        "validation/hacking"
    }
    assert (
        base["validation/reward"]
        == json.loads((out / "samples/000000/measures.json").read_text())["reward"]
    )
    with open(config.data.prompts_csv[0]) as file:
        seen = {row["prompt"] for row in csv.DictReader(file)}
    scores = json.loads((out / "samples/000002/scores.json").read_text())
    for name, kind in (("seen", True), ("unseen", False)):
        rewards = [entry["reward"] for entry in scores if (entry["prompt"] in seen) is kind]
        assert last[f"validation/{name}/reward"] == pytest.approx(sum(rewards) / len(rewards))
    print_summary(out, 2, trainer.validation)
    printed = (
        f"unseen/reward        {base['validation/unseen/reward']:.3f} -> "
        f"{last['validation/unseen/reward']:.3f}, "
    )
    assert (
        f"{printed}{len(rewards)} videos, prompts not used in training" in capsys.readouterr().out
    )
    assert "validation/frechet_distance" in last and without_a_row(last) == []
    assert trainer.validation.picture(2).is_file()
    written = [path.name for path in (*out.iterdir(), *(out / "checkpoints/000002").iterdir())]
    measures = {"spreads", "hacking", "made_with"} & json.loads(
        (out / "samples/000002/measures.json").read_text()
    ).keys()
    page = (ROOT / "docs/monitoring.md").read_text()
    assert len(measures) == 3 and not [
        name for name in (*written, *entries[0], *measures) if f"`{name}" not in page
    ]


@pytest.mark.system
def test_resuming_from_an_older_checkpoint_removes_later_files(tiny_config, mesh, tmp_path):
    config = tiny_config.with_settings(
        max_steps=3, save_interval=1, log_video_interval=1, save_total_limit=0
    )
    Trainer(config, mesh, CPU).train()
    first = str(tmp_path / "run" / "checkpoints" / "000001")
    earlier = config.with_settings(resume_from_checkpoint=first, max_steps=2, save_total_limit=1)
    Trainer(earlier, mesh, CPU).train()
    remaining = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert remaining == ["000002"]
    assert sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir()) == [
        "000001",
        "000002",
    ]
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [1, 2]
    assert Trainer(config, mesh, CPU).iteration == 2


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_validation_continues_if_the_scorer_fails(tiny_config, mesh):
    config = tiny_config.with_settings(valid_video_csv="assets/miniature/prompts/smoke.csv")
    scorer = FailsForPrompts()
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    scorer.fails_for = trainer.validation.prompts[:1]
    metrics = trainer.validation.run(0)
    assert metrics["validation/missing"] == 1 and math.isfinite(metrics["validation/reward"])
    entries = json.loads((trainer.output_dir / "samples/000000/scores.json").read_text())
    reasons = [entry["reason"] for entry in entries if entry["missing"]]
    assert len(reasons) == 1 and "no score" in reasons[0]
    scorer.fails_for = trainer.validation.prompts
    metrics = trainer.validation.run(0)
    assert metrics["validation/missing"] == len(trainer.validation.prompts) and math.isnan(
        metrics["validation/reward"]
    )
    assert math.isnan(trainer.validation.measures(0)["reward"])
