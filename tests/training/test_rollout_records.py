"""Recorded rollouts have the numbers of the iteration, not those of the replica's rows."""

import json
from dataclasses import replace

import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.rewards.rewards import Reward
from hyvideo.settings.sections import DataSettings, RecordSettings
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex
from hyvideo.training.rollout_records import RolloutRecorder

NAN = float("nan")


def record(folder, rewards, iteration, **settings):
    """Record the second of two groups, as a second replica does; return its files and its entries
    of scores.json.
    """
    indices = [RolloutIndex(1, member) for member in range(3)]
    batch = RolloutBatch(
        indices,
        ["a"] * 3,
        None,
        None,
        None,
        None,
        iteration=iteration,
        advantages=torch.arange(3.0),
    )
    batch = replace(batch, rewards={row: Reward(total, {}) for row, total in enumerate(rewards)})
    settings = RecordSettings(output_dir=str(folder), **settings)
    recorder = RolloutRecorder(
        settings, DataSettings(seed=5, fps=24.0), Mesh.single(), group_size=3, num_rollouts=6
    )
    videos = dict.fromkeys(range(3), torch.zeros(2, 3, 256, 256, dtype=torch.uint8))
    recorder.record(batch, videos, iteration, num_missing=sum(total != total for total in rewards))
    path = folder / "rollouts" / f"{iteration:06d}"
    if not path.exists():
        return [], []
    return sorted(file.name for file in path.glob("*.mp4")), json.loads(
        (path / "scores.json").read_text()
    )


def test_numbers_count_the_rollouts_of_all_replicas(tmp_path):
    files, entries = record(tmp_path, [1.0, 2.0, 3.0], 4, log_video_interval=2, log_num_videos=2)
    assert files == ["003.mp4"]  # of 6 rollouts, 0 and 3 are recorded
    assert [(e["number"], e["group"], e["member"], e["file"]) for e in entries] == [
        (3, 1, 0, "003.mp4"),
        (4, 1, 1, None),
        (5, 1, 2, None),
    ]
    assert {(e["iteration"], e["seed"]) for e in entries} == {(4, 5)}
    assert [(e["reward"], e["advantage"]) for e in entries] == [(1, 0), (2, 1), (3, 2)]


def test_between_two_intervals_only_videos_without_a_reward_are_recorded(tmp_path):
    settings = {"log_video_interval": 2, "log_num_videos": 6}
    assert record(tmp_path, [1.0, NAN, 1.0], 3, **settings)[0] == ["004.mp4"]
    assert record(tmp_path, [1.0, 1.0, 1.0], 5, **settings) == ([], [])
    assert record(tmp_path, [1.0, NAN, 1.0], 6, log_video_interval=0) == ([], [])
