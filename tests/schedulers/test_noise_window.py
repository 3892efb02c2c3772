"""Tests of SDE windows: their positions, and that only their steps are stochastic, trained and
counted as cost.
"""

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.data.randomness import generator
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.settings.iteration_plan import make_plan
from hyvideo.trainer import Trainer

CPU = torch.device("cpu")
STEPS = [0, 1, 2, 3, 5, 6]  # step 4 is deterministic


def steps_of(window, stochastic, seed, iteration):
    """Return the steps with noise, drawn as in the trainer."""
    random = generator(seed, "sde window", iteration)
    return window.steps(stochastic, iteration, lambda count: int(random.integers(count)))


def windows_of(text, iterations=6):
    window = parse_window(text, len(STEPS))
    return [steps_of(window, STEPS, 7, iteration) for iteration in range(1, iterations + 1)]


def test_a_fixed_window_is_the_same_in_every_iteration():
    assert windows_of("fixed:2:3", 2) == [[2, 3, 5]] * 2


def test_a_sliding_window_moves_and_wraps_around():
    assert windows_of("sliding:4") == [[0, 1, 2, 3], [1, 2, 3, 5], [2, 3, 5, 6]] * 2
    assert windows_of("sliding:4:2", 3) == [[0, 1, 2, 3], [2, 3, 5, 6], [1, 2, 3, 5]]


def test_a_random_window_depends_only_on_seed_and_iteration():
    seen = windows_of("random:3", 60)
    assert seen == windows_of("random:3", 60) and all(len(steps) == 3 for steps in seen)
    assert {steps[0] for steps in seen} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["fixed:4:2", "random:6"])
def test_a_window_may_end_at_the_last_stochastic_step(text):
    assert len(windows_of(text, 1)[0]) == parse_window(text, len(STEPS)).length
    with pytest.raises(ValueError, match="sde_window"):
        parse_window(
            text, parse_window(text, len(STEPS)).start + parse_window(text, len(STEPS)).length - 1
        )


@pytest.mark.parametrize(
    "text",
    [
        "fixed:3",
        "fixed:5:2",
    ],
)
def test_an_invalid_window_raises_an_error_before_a_run(tiny_config, text):
    with pytest.raises(ValueError, match=f"sde_window.*{text}"):
        check(tiny_config.with_settings(sde_window=text))


def test_only_steps_in_the_window_have_noise_and_are_trained(tiny_config, mesh):
    text = "random:2"
    config = tiny_config.with_settings(
        sde_window=text, grpo_sampling_steps=6, kl_strategy="dual_fixed"
    )
    plan = make_plan(config)
    assert (plan.stochastic_steps, plan.num_trained_steps) == (2, 2)
    trainer = Trainer(config, mesh, CPU)
    iterations = []
    anchor_means = trainer.run.objective.prepare
    trainer.run.objective.prepare = lambda rollouts: (
        iterations.append(rollouts),
        anchor_means(rollouts),
    )[1]
    for _ in range(3):
        trainer.iteration += 1
        metrics = trainer.run_iteration()
        window = steps_of(
            parse_window(text, 5), [0, 1, 2, 3, 4], config.data.seed, trainer.iteration
        )
        visited = iterations[-1].trained_steps
        assert all(sorted(row) == window for row in visited.tolist())
        drawn = iterations[-1].trajectories.log_probs.abs().sum(0) > 0
        assert drawn.nonzero().flatten().tolist() == window
        assert metrics["policy/ratio_max_deviation"] <= 1e-6
        schedule = iterations[-1].schedule
        norms = schedule.log_prob_grad_norms
        # the weights are the lower of the two norms over each
        first, second = norms[window].tolist()
        expected = {window[0]: min(1.0, second / first), window[1]: min(1.0, first / second)}
        found = {
            step: weight
            for step, weight in enumerate(trainer.run.objective.step_weights(schedule).tolist())
            if weight
        }
        assert found == pytest.approx(expected)
    assert metrics["cost/forwards"] == 6 + 3 * 2 + 2  # rollout, training, anchor
    outside = next(i for i in range(6) if i not in window)
    drawn = iterations[-1]
    steps = torch.full((len(drawn), 1), outside)
    ode = trainer.run.source.sample(
        trainer.iteration, drawn.schedule, drawn.indices, drawn.conditions, mean_steps=steps
    )
    assert torch.equal(ode.latents[:, outside + 1], ode.means[:, 0])
