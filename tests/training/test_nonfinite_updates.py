"""What is kept of updates that were skipped."""

import os

import torch
from safetensors.torch import load_file

from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.training.nonfinite_updates import NonFiniteUpdates
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex


def rollouts(number):
    trajectories = Trajectories(torch.full((1, 2, 1, 1, 1, 1), float(number)), torch.zeros(1), torch.zeros(1, 1))
    batch = RolloutBatch([RolloutIndex(0, 0)], ["a"], None, trajectories, torch.zeros(1, 1, dtype=torch.long))
    return batch.scored({0: Reward(1.0, {"VQ": float("nan")})}, torch.zeros(1))


def test_the_newest_three_bad_updates_of_each_rank_are_kept(tmp_path):
    """Newest by time: a run that starts over in its folder counts its iterations from 1 again."""
    folder = tmp_path / "bad_updates"
    main, other = (NonFiniteUpdates(tmp_path, Mesh(rank, 2, 1), max_bad_updates=9) for rank in range(2))
    other.bad(rollouts(9), ranks=[1], iteration=9)
    for time, iteration in enumerate((7, 8, 9, 1, 2)):
        main.bad(rollouts(iteration), ranks=[0], iteration=iteration)
        for file in folder.glob(f"*{iteration}-rank0*"):
            os.utime(file, (time, time))
    kept = ["000001-rank0", "000002-rank0", "000009-rank0", "000009-rank1"]
    assert sorted(os.listdir(folder)) == [name + end for name in kept for end in (".json", ".safetensors")]
    assert (load_file(folder / "000002-rank0.safetensors")["latents"] == 2).all()


def test_a_divergence_is_told_with_the_iteration_in_which_the_range_was_left(tmp_path):
    health = NonFiniteUpdates(tmp_path, Mesh(0, 1, 1), max_bad_updates=9)
    for iteration in (1, 2, 3):
        health.spike(1.0, iteration)
    assert "by the update of iteration 3, before which" in health.divergence(4)
    health.spike(100.0, 4)
    again = NonFiniteUpdates(tmp_path, Mesh(0, 1, 1), max_bad_updates=9)
    again.load_state_dict(health.state_dict())
    assert "left the usual range in iteration 4" in again.divergence(6)
    for iteration in (7, 8):
        again.bad(rollouts(1), ranks=[0], iteration=iteration)
    assert "left the usual range in iteration 7" in again.divergence(9)
