"""Fresh rollouts have a log-ratio of 0 where they were sampled as they are trained; and nothing waits for the GPU."""

from dataclasses import replace

import pytest
import torch

from hyvideo.distributed.parallelize import Parallelism
from hyvideo.evaluation.gpu_checks import arrange, condition, drawn, kernels_of, only, sampler
from hyvideo.evaluation.speed import Workload
from hyvideo.models.attention_kernels import use_fastest_kernels
from hyvideo.pipelines.conditions import Conditions
from scripts.gpu_check import TINY_MODEL

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def work(gpu):
    """Eight blocks of full width and two latent frames on a GPU."""
    use_fastest_kernels()
    if gpu.type == "cpu":
        return Workload(gpu, sizes=TINY_MODEL, grid=(2, 4, 4), text_tokens=8)
    return Workload(gpu, sizes={"num_layers": 8}, grid=(2, 30, 54))


@pytest.fixture(scope="module")
def pipeline(work):
    return sampler(work, 20 if work.device.type == "cuda" else 2)


@pytest.mark.parametrize("batch, batched", [(2, False), (1, True), (2, True), (4, True)])
@pytest.mark.parametrize("kernel", ["default", "flash", "cudnn"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_log_ratios(work, pipeline, record_property, compiled, kernel, batch, batched):
    """Largest of all steps, replayed one by one. What batches cost is told and may be anything."""
    if kernel not in kernels_of(work.device) or (work.device.type == "cpu" and batched and batch > 1):
        return  # the CPU has one kernel, and every shape is compiled anew
    arrange(pipeline.transformer, Parallelism(recompute="full", compile=compiled), work.device)
    pipeline.sampling = replace(pipeline.sampling, batched_forward=batched)
    conditions = Conditions((condition(work, "positive"),) * batch)
    with only(kernels_of(work.device)[kernel]):
        rollouts = pipeline.sample(
            conditions, drawn(work, batch, "initial"), lambda step: drawn(work, batch, f"step {step}")
        )
        largest = [log_ratio(pipeline, rollouts, conditions, [batch - 1], gradient) for gradient in (False, True)]
    record_property("no_grad", largest[0])
    record_property("grad", largest[1])
    assert batched or largest == [0, 0]


def log_ratio(pipeline, rollouts, conditions, row, has_gradient):
    ratios = []
    for step in pipeline.scheduler.stochastic_steps(eta=pipeline.sampling.eta, sde_type=pipeline.sampling.sde_type):
        before, after = (rollouts.latents[row, number] for number in (step, step + 1))
        with torch.set_grad_enabled(has_gradient):
            again = pipeline.replay(before, after, pipeline.scheduler.timesteps[[step]], conditions.select(row))
        ratios.append((again.log_prob.detach() - rollouts.log_probs[row, step]).abs().amax())
    return torch.stack(ratios).amax().item()


def test_replay_and_backward_wait_for_nothing(work):
    """On the CPU there is nothing to wait for: the passes are made."""
    pipeline = sampler(work)
    arrange(pipeline.transformer, Parallelism(recompute="selective"), work.device)
    conditions, latents = Conditions((condition(work, "positive"),)), drawn(work, 1, "initial")
    timestep = pipeline.scheduler.timesteps[[3]]

    def replay_and_backward():
        pipeline.replay(latents, latents, timestep, conditions).log_prob.sum().backward()

    replay_and_backward()  # what is cached is there now
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
        torch.cuda.set_sync_debug_mode("error")
    try:
        replay_and_backward()
    finally:
        if work.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
