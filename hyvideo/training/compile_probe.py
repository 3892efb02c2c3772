"""Probe of compiled blocks at the start of a run: rollout and update must compute the same numbers.

torch compiles a block once for inference and once for training. Both fuse and round alike, but
Inductor may choose another kernel in one of them, for example from the artifacts of another rank in
a shared cache. Without this probe, the on-policy check would find that only after the first
rollouts.
"""

import sys

import torch

from hyvideo.data.randomness import normal
from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.schedulers.schedule import Schedule


def match_gradient_mode(
    pipeline: GRPOPipeline,
    schedule: Schedule,
    conditions: Conditions,
    size: tuple[int, int, int],
    mesh: Mesh,
    *,
    batch_size: int = 1,
) -> None:
    """Sample in gradient mode if compiled blocks compute other numbers without gradient, on any
    rank. Collective.

    Args:
        schedule: Schedule of the rollouts, of which the first step of the policy is compared.
        conditions: Condition of one prompt; each rank may have another.
        size: Frames, height and width of the rollouts.
        batch_size: Samples of a training forward pass: blocks are compiled once for one sample and
            once for several.
    """
    conditions = conditions.select([0] * batch_size)
    if _agrees(pipeline, schedule, conditions, size, mesh):
        return
    pipeline.samples_in_gradient_mode = True
    agrees = _agrees(pipeline, schedule, conditions, size, mesh)
    if mesh.is_main:
        found = "compiled blocks compute other numbers with gradient than without"
        done = "rollouts are therefore sampled in gradient mode, with the graphs of training"
        print(f"\n{found}; {done}", file=sys.stderr, flush=True)
        if not agrees:
            advice = "the on-policy check may stop the run. Set enable_compile false"
            print(f"they still differ, and {advice}", file=sys.stderr, flush=True)


def _agrees(
    pipeline: GRPOPipeline,
    schedule: Schedule,
    conditions: Conditions,
    size: tuple[int, int, int],
    mesh: Mesh,
) -> bool:
    """Return whether the policy's first velocity of a rollout has the same bits with and without
    gradient, on all ranks.
    """
    batch_size = len(conditions)
    noise = to_device(
        normal((batch_size, *pipeline.latent_shape(*size)), 0, "compile probe"), pipeline.device
    )
    steps = [pipeline.first_own_step(schedule)] * batch_size
    with torch.no_grad():
        sampled = pipeline.velocity_at_steps(noise, schedule, steps, conditions)
    trained = pipeline.velocity_at_steps(noise, schedule, steps, conditions).detach()
    return all(all_objects(torch.equal(sampled, trained), mesh))
