"""The log-ratio of fresh rollouts is 0 if they are sampled and trained alike, and no pass waits for
the GPU.
"""

import pytest
import torch

from hyvideo.models.conditions import Conditions
from hyvideo.training.on_policy_check import EXACT
from tests.cuda.speed import Workload
from tests.cuda.workload import (
    DEVICE,
    IS_TINY,
    WAYS,
    arrange,
    condition,
    drawn,
    only,
    sampler,
    schedule_of,
)

pytestmark = pytest.mark.cuda
BATCH = 2  # rollouts, in one forward pass each


@pytest.fixture(scope="module")
def few_blocks(work):
    """Eight blocks of full width and two latent frames of the recipes' size."""
    return (
        work
        if IS_TINY
        else Workload(work.device, sizes={"num_layers": 8}, grid=(2, *work.grid[1:]))
    )


@pytest.fixture(scope="module")
def pipeline(few_blocks):
    return sampler(few_blocks)


@pytest.fixture(scope="module")
def schedule():
    return schedule_of(2 if IS_TINY else 20)


@pytest.mark.parametrize("compiled, kernel", WAYS.values(), ids=WAYS)
def test_log_ratios(few_blocks, pipeline, schedule, record, compiled, kernel):
    """Records the largest log-ratio of all steps, sampled and replayed one by one."""
    arrange(pipeline.transformer, recompute="full", compile=compiled)
    conditions = Conditions((condition(few_blocks, "positive"),) * BATCH)
    with only(kernel):
        rollouts = pipeline.sample(
            conditions,
            drawn(few_blocks, BATCH, "initial"),
            schedule,
            lambda step: drawn(few_blocks, BATCH, f"step {step}"),
        )
        for name, has_gradient in (("no_grad", False), ("grad", True)):
            largest = log_ratio(pipeline, schedule, rollouts, conditions, [BATCH - 1], has_gradient)
            record({name: largest})
            assert largest <= EXACT  # the velocities are bit-identical


def log_ratio(pipeline, schedule, rollouts, conditions, row, has_gradient):
    ratios = []
    for step in schedule.stochastic_steps:
        before, after = (rollouts.latents[row, number] for number in (step, step + 1))
        with torch.set_grad_enabled(has_gradient):
            again = pipeline.replay(before, after, schedule, [step], conditions.select(row))
        ratios.append((again.log_prob.detach() - rollouts.log_probs[row, step]).abs().amax())
    return torch.stack(ratios).amax().item()


def test_eager_replay_and_backward_do_not_synchronize(few_blocks, pipeline, schedule):
    """On a CPU, the passes run without a check."""
    arrange(pipeline.transformer, recompute="selective")
    conditions, latents = (
        Conditions((condition(few_blocks, "positive"),)),
        drawn(few_blocks, 1, "initial"),
    )

    def replay_and_backward():
        pipeline.replay(latents, latents, schedule, [1], conditions).log_prob.sum().backward()

    replay_and_backward()  # fills caches
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
        torch.cuda.set_sync_debug_mode("error")
    try:
        replay_and_backward()
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
