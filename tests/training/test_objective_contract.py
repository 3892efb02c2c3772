"""What every objective promises to the loop, built-in or custom."""

import pytest
import torch

from hyvideo.settings.rules import check
from hyvideo.trainer import Trainer
from hyvideo.training.custom_objective import check_terms
from hyvideo.training.rollout_batch import chunks
from tests.forked import ROOT
from tests.rated_pairs import DPO, PROMPTS, write_pairs
from tests.shallow import SHALLOW
from tests.test_trainer import CPU, weights
from tests.training.test_reward_gradient import Contrast

LEVELS = {"eta": 0.0, "nft_levels": 2, "learning_rate": 1e-3}
SFT = {
    "kl_strategy": "none",
    "nft_levels": 2,
    "num_generations": 1,
    "learning_rate": 1e-3,
}
REWARD = {"reward_weights": '{"VQ": 0.5, "MQ": 2}'}
OBJECTIVES = {
    "grpo": {"learning_rate": 1e-3},
    "nft": {"objective": "nft"} | LEVELS,
    "nft and reward": {"objective": "nft", "reward_gradient_weight": 0.1} | LEVELS,
    "draft": {"objective": "draft", "kl_strategy": "moving"} | LEVELS,
    "dpo": DPO,
    "distill": {
        "objective": "distill",
        "kl_strategy": "fixed",
        "eta": 0.0,
        "grpo_sampling_steps": 2,
        "anchor_cfg_scale": 3.0,
        "learning_rate": 1e-3,
    },
    "regression": {"objective": f"{ROOT}/examples/custom_objective.py:WeightedRegression"} | LEVELS,
    "sft": SFT | {"objective": "sft"},
    "captioned": SFT | {"objective": f"{ROOT}/examples/custom_data.py:Captioned"},
}


@pytest.fixture(params=OBJECTIVES)
def trainer(request, tiny_config, mesh, tmp_path):
    settings = OBJECTIVES[request.param] | REWARD | {"pretrained_model_root": SHALLOW}
    pairs = write_pairs(tmp_path / "videos")
    if request.param == "dpo":
        settings["pairs_csv"] = [str(pairs)]
    if request.param == "sft":
        videos = pairs.with_name("videos.csv")
        rows = "".join(f"{prompt},{row}a.mp4\n" for row, prompt in enumerate(PROMPTS))
        videos.write_text(f"prompt,video\n{rows}")
        settings["videos_csv"] = [str(videos)]
    if request.param == "captioned":
        for row, prompt in enumerate(PROMPTS):
            (pairs.parent / f"{row}a.txt").write_text(prompt)
        settings["captioned_folders"] = [str(pairs.parent)]
    config = tiny_config.with_settings(**settings)
    check(config)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Contrast()})
    trainer.iteration = 1
    return trainer


def gradient_of(trainer, collected, rows_per_pass):
    """Return the gradient of the mean loss, from passes of some rows."""
    objective, policy = trainer.run.objective, trainer.run.policy
    rollouts = collected.rollouts
    policy.optimizers.zero_grad()
    for rows in chunks(range(len(rollouts)), rows_per_pass):
        for column in rollouts.columns:
            terms = objective.terms(rollouts, collected.reference, rows, column, kl_coefficient=0.1)
            check_terms(terms, objective, rows)
            assert all(value.isfinite().all() for value in (terms.loss, terms.kl))
            # the policy is still that of the rollouts
            torch.testing.assert_close(
                terms.deviation, torch.zeros_like(terms.deviation), rtol=0, atol=1e-5
            )
            (terms.loss.sum() / len(rollouts)).backward()
    gradients = [p.grad.flatten() for p in policy.parameters if p.grad is not None]
    policy.optimizers.zero_grad()
    return torch.cat(gradients)


def test_the_gradient_of_an_iteration_does_not_depend_on_the_rows_of_a_pass(trainer):
    collected = trainer.run.objective.collect(trainer.run, trainer.iteration)
    rollouts = collected.rollouts
    assert len(rollouts) == trainer.run.inputs.plan.rollouts == len(rollouts.advantages)
    assert len(rollouts.columns) == rollouts.trained_steps.shape[1] > 0
    assert rollouts.advantages.isfinite().all()
    of_pairs, of_all = (gradient_of(trainer, collected, rows) for rows in (2, len(rollouts)))
    assert of_all.norm() > 0
    assert (of_pairs - of_all).norm() <= 1e-3 * of_all.norm()


def test_an_iteration_moves_the_weights_and_reports_its_metrics(trainer):
    before = weights(trainer)
    metrics = trainer.run_iteration()
    assert not all(map(torch.equal, before, weights(trainer)))
    objective = trainer.run.objective
    assert {*objective.metrics, *objective.deviation_names} <= metrics.keys()
    assert metrics["cost/forwards"] > 0 and metrics["grad/norm"] > 0


def test_the_same_iteration_is_collected_again_after_a_resume(trainer):
    first, again = (trainer.run.objective.collect(trainer.run, 1).rollouts for _ in range(2))
    other = trainer.run.objective.collect(trainer.run, 2).rollouts
    assert first.indices == again.indices and first.prompts == again.prompts
    assert torch.equal(first.trajectories.latents, again.trajectories.latents)
    assert torch.equal(first.trained_steps, again.trained_steps)
    assert not torch.equal(first.trajectories.latents, other.trajectories.latents)
