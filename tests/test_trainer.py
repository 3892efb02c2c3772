"""The training loop on random weights of the real classes: invariants of GRPO, the trust region,
and output files.
"""

import csv
import json
import math
import time

import pytest
import torch

from hyvideo.data.run_folder import LEASE, NotOwner, RunRecord, claim, write_record
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.hours import forwards_per_rollout
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.report.run_summary import print_summary
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.trainer import Finished, Trainer
from hyvideo.training.rollout_batch import RolloutBatch
from tests.forked import ROOT
from tests.records.test_metrics_page import undocumented
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
TIMING = ("time/", "memory/", "perf/")


@pytest.fixture
def tiny_config(tiny_config):
    return tiny_config.with_settings(pretrained_model_root=SHALLOW)


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


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.run.policy.parameters]


def first_prompt(trainer):
    """Return the prompt of the iteration's first rollout."""
    return trainer.run.source.requests_of(trainer.iteration, trainer.run.source.indices())[0].prompt


def without_times(line):
    return {name: value for name, value in line.items() if not name.startswith(TIMING)}


# --- invariants of GRPO ---------------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", ["sage_grpo", "flow_grpo", "dance_grpo", "cps"])
def test_the_first_ratio_of_fresh_rollouts_is_exactly_one(tiny_config, mesh, sde_type):
    (metrics,), _ = run(tiny_config.with_settings(sde_type=sde_type), mesh)
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
    assert sum(means) / 3 == pytest.approx(history[0]["policy/ratio_mean"], rel=1e-6)


@pytest.mark.slow
def test_the_report_at_the_end_of_a_run_lists_the_last_checkpoint(tiny_config, mesh):
    config = tiny_config.with_settings(report=True, max_steps=1)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.train()
    page = (trainer.output_dir / "report.html").read_text()
    assert (trainer.output_dir / "checkpoints/000001").is_dir() and '"checkpoint":1' in page


@pytest.mark.slow
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
    assert "2 iterations, 16 rollouts" in page.read_text()
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


@pytest.mark.parametrize("sde_type", ["sage_grpo", pytest.param("cps", marks=pytest.mark.slow)])
def test_the_reward_rises(tiny_config, mesh, sde_type):
    config = tiny_config.with_settings(
        sde_type=sde_type,
        batch_size=16,
        num_generations=8,
        mini_batch_size_per_update=16,
        learning_rate=2e-3,
    )
    history, _ = run(config, mesh, iterations=14)
    rewards = [metrics["reward/mean"] for metrics in history]
    group_std = history[0]["reward/std"]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + group_std


def test_two_runs_with_the_same_seed_are_equal_bit_for_bit(tiny_config, mesh):
    first, _ = run(tiny_config, mesh, iterations=2)
    second, _ = run(tiny_config, mesh, iterations=2)
    assert [without_times(line) for line in first] == [without_times(line) for line in second]


@pytest.mark.system
def test_another_seed_gives_other_rewards(tiny_config, mesh):
    first, _ = run(tiny_config, mesh)
    second, _ = run(tiny_config.with_settings(seed=7), mesh)
    assert first[0]["reward/mean"] != second[0]["reward/mean"]


def test_rollouts_do_not_depend_on_the_batch_size(tiny_config, mesh):
    whole, _ = run(tiny_config, mesh)
    parts, _ = run(tiny_config.with_settings(batch_size=4, gradient_accumulation_steps=2), mesh)
    for name in ("reward/mean", "reward/std", "policy/log_prob", "grad/norm"):
        assert parts[0][name] == pytest.approx(whole[0][name], rel=1e-3), name


def test_the_gradient_does_not_depend_on_the_mini_batch_size(tiny_config, mesh):
    whole, _ = run(tiny_config, mesh)
    parts, _ = run(tiny_config.with_settings(mini_batch_size_per_update=2), mesh)
    assert parts[0]["grad/norm"] == pytest.approx(whole[0]["grad/norm"], rel=1e-4)


def test_the_loss_equals_its_definition(tiny_config, mesh):
    """Clipped surrogate with step weights plus both KL terms, for rows that train their steps in
    different orders.
    """
    config = tiny_config.with_settings(
        kl_weight=0.5, kl_coef=0.5, kl_schedule="constant", dual_kl_step_weight=0.3
    )
    _, trainer = run(config, mesh)  # the policy has moved away from its rollouts
    indices = trainer.run.source.indices()
    conditions = trainer.run.encoder(trainer.run.source.requests_of(trainer.iteration, indices))
    trained_steps = torch.tensor([[2, 0, 1], [1, 2, 0]] * 4)
    schedule = trainer.run.source.schedule
    drawn = trainer.run.source.sample(
        trainer.iteration, schedule, indices, conditions, mean_steps=trained_steps
    )
    advantages = torch.linspace(-2, 2, 8)
    rollouts = RolloutBatch(
        indices, [], conditions, drawn, schedule, trained_steps, advantages=advantages
    )
    weights = trainer.run.objective.step_weights(schedule)
    last_step = config.rollout.last_step
    assert schedule == Schedule.build(
        "sage_grpo", num_steps=4, shift=3.0, eta=0.7, last_step=last_step
    )
    with torch.no_grad():
        for parameter in trainer.run.policy.parameters:
            parameter.add_(1e-3 * torch.randn_like(parameter))
        anchor = drawn.means[:, 0] + 0.1
        reference = dict.fromkeys(rollouts.columns, anchor)
        terms = trainer.run.objective.terms(
            rollouts, reference, list(range(8)), 0, kl_coefficient=0.5
        )
        for row in range(8):
            step = int(trained_steps[row, 0])
            new = rollouts.replay(trainer.run.pipeline, [row], trained_steps[[row], 0])
            ratio = (new.log_prob - drawn.log_probs[row, step]).exp()
            clipped = ratio.clamp(1 - config.objective.clip_range, 1 + config.objective.clip_range)
            policy = weights[step] * torch.maximum(
                -advantages[row] * ratio, -advantages[row] * clipped
            )
            variance = schedule.transitions[step].std ** 2
            position = ((new.mean - anchor[row]) ** 2).mean() / (2 * variance + 1e-6)
            velocity = drawn.log_probs[row, step] - new.log_prob
            expected = policy + 0.5 * (position + 0.3 * velocity)
            assert terms.loss[row].item() == pytest.approx(expected.item(), rel=1e-4), row
    assert len(set(weights[:3].tolist())) == 3  # so that a weight of the wrong step is detected


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


def test_the_coefficient_follows_the_measured_kl(tiny_config, mesh):
    config = tiny_config.with_settings(kl_strategy="fixed", learning_rate=1e-3)
    history, trainer = run(config, mesh, iterations=3)
    assert list(trainer.run.update.kl_coefficient.recent) == pytest.approx(
        [line["kl/position"] for line in history]
    )
    assert history[2]["kl/position"] > 0


# --- trust region ---------------------------------------------------------------------------------


def test_the_anchor_needs_no_forward_pass_while_it_equals_the_policy(tiny_config, mesh):
    config = tiny_config.with_settings(update_ref_model_step=1)
    history, trainer = run(config, mesh, iterations=2)
    plan = make_plan(config)
    rollout_and_training = 4 + 3 * plan.num_trained_steps
    assert [line["cost/forwards"] for line in history] == [rollout_and_training] * 2
    assert all(line["kl/position"] == 0 for line in history)
    assert trainer.run.policy.anchor.age == 0


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"batched_forward": False}, marks=pytest.mark.slow)]
)
def test_steps_outside_the_guidance_interval_cost_one_branch_in_rollout_update_and_anchor(
    tiny_config, mesh, settings
):
    guided = {
        "cfg_scale": 2.0,
        "guidance_interval": "0.6:0.95",
        "kl_strategy": "dual_fixed",
        "learning_rate": 1e-3,
    }
    config = tiny_config.with_settings(**guided, **settings)
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


def test_a_fixed_anchor_measures_the_kl_to_the_initial_policy(tiny_config, mesh):
    config = tiny_config.with_settings(kl_strategy="dual_fixed", learning_rate=1e-3)
    history, trainer = run(config, mesh, iterations=3)
    distances = [line["kl/position"] for line in history]
    assert distances[0] == 0 < distances[1] < distances[2]
    assert history[1]["cost/forwards"] == history[0]["cost/forwards"] + 3  # one per stochastic step
    assert trainer.run.policy.anchor.age == 3


@pytest.mark.slow
def test_a_strong_position_kl_keeps_the_policy_near_its_start(tiny_config, mesh):
    free = tiny_config.with_settings(kl_strategy="dual_fixed", learning_rate=1e-3, kl_weight=0.0)
    constrained = free.with_settings(kl_weight=1e4, kl_schedule="constant")
    start = weights(Trainer(free, mesh, CPU, scorers={"test": Redness()}))

    def drift(config):
        _, trainer = run(config, mesh, iterations=4)
        return sum(((a - b) ** 2).sum() for a, b in zip(weights(trainer), start))

    assert drift(constrained) < drift(free)


@pytest.mark.parametrize(
    "strategy, kl_velocity",
    [
        ("none", "log_ratio"),
        ("stepwise", "log_ratio"),
        ("dual_moving", "log_ratio"),
        ("dual_moving", "gaussian"),
    ]
    + [
        pytest.param(name, "log_ratio", marks=pytest.mark.slow)
        for name in ("fixed", "moving", "dual_fixed")
    ]
    + [
        pytest.param(name, "gaussian", marks=pytest.mark.slow)
        for name in ("stepwise", "dual_fixed")
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


def test_a_rollout_without_reward_is_left_out_and_counted(tiny_config, mesh):
    (metrics,), _ = run(tiny_config, mesh, scorer=FirstMissing())
    (full,), _ = run(tiny_config, mesh)
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
    assert "validation/frechet_distance" in last and undocumented(last) == []
    assert trainer.validation.picture(2).is_file()
    written = [path.name for path in (*out.iterdir(), *(out / "checkpoints/000002").iterdir())]
    measures = {"spreads", "hacking", "made_with"} & json.loads(
        (out / "samples/000002/measures.json").read_text()
    ).keys()
    page = (ROOT / "docs/output_files.md").read_text()
    assert len(measures) == 3 and not [
        name for name in (*written, *entries[0], *measures) if f"`{name}" not in page
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dual_moving", "fixed"])  # test_run_state has others
def test_a_resumed_run_equals_the_uninterrupted_run(tiny_config, mesh, tmp_path, strategy):
    config = tiny_config.with_settings(
        kl_strategy=strategy,
        max_steps=4,
        save_interval=2,
        update_ref_model_step=3,
        learning_rate=1e-3,
    )
    uninterrupted = Trainer(config, mesh, CPU)
    uninterrupted.train()
    expected = [without_times(line) for line in lines(tmp_path / "run")]

    interrupted = config.with_settings(output_dir=str(tmp_path / "interrupted"))
    Trainer(interrupted.with_settings(max_steps=2), mesh, CPU).train()
    resumed = Trainer(interrupted, mesh, CPU)
    assert resumed.iteration == 2
    resumed.train()
    assert [without_times(line) for line in lines(tmp_path / "interrupted")] == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(uninterrupted), weights(resumed)))


@pytest.mark.system
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tiny_config, mesh, tmp_path):
    """It has recorded that it never saved, so nothing of it can be resumed."""
    config = tiny_config.with_settings(max_steps=1)
    out = tmp_path / "run"
    write_record(out, RunRecord(run="0f0f0f0f", settings=config.flat()))
    claim(out / "rollouts" / "000002", "0f0f0f0f")
    (out / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match="--allow_changed_settings eta$"):
        Trainer(config.with_settings(eta=0.1), mesh, CPU, scorers={"test": Redness()})
    Trainer(config, mesh, CPU, scorers={"test": Redness()}).train()
    assert not (out / "rollouts" / "000002").exists()
    assert [line["iteration"] for line in lines(out)] == [1]
    assert "reward/mean" in lines(out)[0]


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


@pytest.mark.system
def test_a_finished_run_is_left_as_it_is_and_trained_on_with_more_steps(
    tiny_config, mesh, tmp_path
):
    config = tiny_config.with_settings(max_steps=2, save_interval=1)
    Trainer(config, mesh, CPU).train()
    before = files(tmp_path)
    for max_steps in (1, 2):
        with pytest.raises(Finished):
            Trainer(config.with_settings(max_steps=max_steps), mesh, CPU)
    with pytest.raises(ValueError, match="--allow_changed_settings eta$"):
        Trainer(config.with_settings(eta=0.1), mesh, CPU)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "000002")
    elsewhere = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": checkpoint}
    with pytest.raises(ValueError, match="max_steps"):
        Trainer(config.with_settings(**elsewhere), mesh, CPU)
    assert files(tmp_path) == before
    assert Trainer(config.with_settings(max_steps=3), mesh, CPU).iteration == 2


@pytest.mark.slow
def test_unreadable_metrics_do_not_remove_checkpoints(tiny_config, mesh, tmp_path):
    config = tiny_config.with_settings(max_steps=2, save_interval=1, log_video_interval=1)
    Trainer(config, mesh, CPU).train()
    run = tmp_path / "run"
    (run / "metrics.jsonl").write_text('broken\n{"iteration": 2}\n')
    before = files(run)
    first = str(run / "checkpoints" / "000001")
    with pytest.raises(ValueError, match="line 1 of .*metrics.jsonl"):
        Trainer(config.with_settings(resume_from_checkpoint=first), mesh, CPU)
    assert files(run) == before


def test_a_trainer_that_has_lost_the_folder_changes_no_file(tiny_config, mesh, tmp_path):
    config = tiny_config.with_settings(max_steps=1)
    overtaken = Trainer(config, mesh, CPU)
    (tmp_path / "run" / LEASE).unlink()
    Trainer(config, mesh, CPU).train()
    before = files(tmp_path)
    with pytest.raises(NotOwner):
        overtaken.train()
    assert files(tmp_path) == before


def test_validation_continues_if_the_scorer_fails(tiny_config, mesh):
    config = tiny_config.with_settings(valid_video_csv="assets/miniature/prompts/smoke.csv")
    scorer = FailsForPrompts()
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    scorer.fails_for = trainer.validation.prompts[:1]
    metrics = trainer.validation.run(0)
    assert metrics["validation/missing"] == 1 and math.isfinite(metrics["validation/reward"])
    scorer.fails_for = trainer.validation.prompts
    metrics = trainer.validation.run(0)
    assert metrics["validation/missing"] == len(trainer.validation.prompts) and math.isnan(
        metrics["validation/reward"]
    )
    assert math.isnan(trainer.validation.measures(0)["reward"])


class Slow(Redness):
    """Takes 0.5 s per batch while ``is_slow``."""

    is_slow = True

    def score(self, videos, prompts, *, fps):
        time.sleep(0.5 if self.is_slow else 0.0)
        return super().score(videos, prompts, fps=fps)


@pytest.mark.system
def test_scoring_time_of_validation_is_not_counted_in_the_next_iteration(tiny_config, mesh):
    config = tiny_config.with_settings(valid_video_csv="assets/miniature/prompts/smoke.csv")
    scorer = Slow()
    trainer = Trainer(config, mesh, CPU, scorers={"test": scorer})
    trainer.validate()
    scorer.is_slow = False
    trainer.iteration = 1
    assert 0 < trainer.run_iteration()["time/scoring"] < 0.5
