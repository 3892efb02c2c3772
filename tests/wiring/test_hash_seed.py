"""No result depends on the order of a set, which each process draws anew for strings.

Ranks would mix up what they exchange, and a resumed run would differ from the uninterrupted one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.data.examples import Example
from hyvideo.data.pairs import split_by_prompt
from hyvideo.data.prompts import Request
from hyvideo.distributed.mesh import Mesh
from hyvideo.rewards.rewards import Reward
from hyvideo.training.rewards import merge_rewards
from tests.forked import ROOT, python
from tests.shallow import SHALLOW

HASH_SEED = "20000"  # that of this process and of forked programs is random
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


def in_new_process(*words):
    """Run Python in a new process with another order of sets, and return its output."""
    variables = {"PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode in (0, 3)  # 3: reward hacking
    return done.stdout


def ordered_names():
    """Return the held-out pairs, and the columns of rewards with their values."""
    here = Path()
    pairs = [Example(Request(name), (here, here), "") for name in NAMES]
    held_out = [pair.request.prompt for pair in split_by_prompt(pairs, 0).held_out]
    scores = {name: float(number) for number, name in enumerate(NAMES)}
    names, rewards = merge_rewards({0: Reward(0.0, scores)}, 1, Mesh.single())
    return [held_out, names, rewards.tolist()]


def test_held_out_pairs_and_columns_of_rewards_are_the_same_in_every_process():
    code = (
        f"import json; from {__name__} import NAMES, ordered_names\n"
        "print(json.dumps([list(set(NAMES)), ordered_names()]))"
    )
    other_set, other = json.loads(in_new_process("-c", code))
    assert other_set != list(set(NAMES))
    found = ordered_names()
    assert found[0] and found == other


@pytest.mark.system
def test_runs_in_processes_with_other_hash_seeds_are_equal(tmp_path):
    words = [str(word) for setting in RUN.items() for word in setting]
    command = ["post_train.py", "--config", "configs/smoke.yaml", *words, "--output_dir"]
    in_new_process(*command, str(tmp_path / "new"))
    forked = subprocess.run([python(), *command, str(tmp_path / "forked")], cwd=ROOT)
    assert forked.returncode in (0, 3)
    assert read(tmp_path / "new") == read(tmp_path / "forked")


def read(run):
    """Return the metrics of a run that do not measure time, in order, and its scores."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "perf/")
    metrics = [
        [each for each in line.items() if not each[0].startswith(measured)] for line in lines
    ]
    return metrics, [path.read_text() for path in sorted(run.glob("samples/*/scores.json"))]
