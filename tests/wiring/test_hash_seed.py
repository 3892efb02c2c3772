"""No result depends on the order of a set, which each process draws anew for strings.

Ranks would mix up what they exchange, and a resumed run would differ from the uninterrupted one.
"""

import json
import os
import subprocess
import sys

import pytest

from hyvideo.distributed.mesh import Mesh
from tests.forked import ROOT
from tests.shallow import SHALLOW

SEEDS = ("1", "2")
NAMES = [f"score {number}" for number in range(12)]
RUN = {
    "--pretrained_model_root": SHALLOW,
    "--valid_video_csv": "assets/miniature/prompts/smoke.csv",
    "--max_steps": 2,
    "--validation_interval": 2,
    "--validation_steps": 2,
    "--num_threads": 1,
    "--report": False,
    "--report_to": "none",
}


def in_processes(*words):
    """Run Python in one new process for each hash seed, at the same time, and return its output."""
    processes = [
        subprocess.Popen(
            [sys.executable, *(str(word).replace("SEED", seed) for word in words)],
            cwd=ROOT,
            env=os.environ
            | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] in ([0, 0], [3, 3])  # 3: reward hacking
    return outputs


def print_names():
    """Print held-out pairs and the order of the columns of rewards."""
    from pathlib import Path

    from hyvideo.data.examples import Example
    from hyvideo.data.pairs import split_by_prompt
    from hyvideo.data.prompts import Request
    from hyvideo.rewards.rewards import Reward
    from hyvideo.training.rewards import merge_rewards

    here = Path()
    pairs = [Example(Request(name), (here, here), "") for name in NAMES]
    held_out = [pair.request.prompt for pair in split_by_prompt(pairs, 0).held_out]
    scores = {name: float(number) for number, name in enumerate(NAMES)}
    names, rewards = merge_rewards({0: Reward(0.0, scores)}, 1, Mesh.single())
    print(json.dumps([held_out, names, rewards.tolist()]))


def test_held_out_pairs_and_columns_of_rewards_are_the_same_in_every_process():
    code = f"from {__name__} import print_names; print_names()"
    first, other = in_processes("-c", code)
    assert json.loads(first)[0] and first == other


@pytest.mark.system
def test_runs_in_processes_with_other_hash_seeds_are_equal(tmp_path):
    settings = RUN | {"--output_dir": tmp_path / "SEED"}
    words = [word for pair in settings.items() for word in pair]
    in_processes("post_train.py", "--config", "configs/smoke.yaml", *words)
    first, other = (read(tmp_path / seed) for seed in SEEDS)
    assert first == other


def read(run):
    """Return the metrics of a run that do not measure time, in order, and its scores."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "perf/")
    metrics = [
        [each for each in line.items() if not each[0].startswith(measured)] for line in lines
    ]
    return metrics, [path.read_text() for path in sorted(run.glob("samples/*/scores.json"))]
