"""Every kind of run, made short, says in its files what it did: the audit recomputes it."""

import csv
import os
import socket
import subprocess

import pytest

from scripts.audit.__main__ import audit_of
from scripts.audit.statements import AGREES, DIFFERS, UNCHECKED
from tests.audit.cases import ALL, Case, cases, flags
from tests.forked import ROOT, python
from tests.rated_pairs import PROMPTS, write_clip, write_pairs

MISSING = "not known before the inputs are written"
NAMES = list(cases(MISSING, MISSING))
VIDEOS = [  # prompt, score, keep: four of the best are kept of the first prompt, two of the second
    (PROMPTS[number % 2], round(0.05 + number * 7 % 10 / 10, 2), int(number != 3))
    for number in range(10)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """CSV files of rated pairs and of scored videos."""
    folder = tmp_path_factory.mktemp("inputs")
    pairs = write_pairs(folder / "pairs")
    with (folder / "videos.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "video", "score", "keep"])
        for number, (prompt, score, keep) in enumerate(VIDEOS):
            write_clip(folder / f"{number}.mp4", 100 + number)
            writer.writerow([prompt, f"{number}.mp4", score, keep])
    return pairs, folder / "videos.csv"


def train(case: Case, folder) -> None:
    """Train a case, with each of its ranks in a process."""
    for iterations in (*case.stops_after, case.iterations):
        command = ["post_train.py", "--config", f"configs/{case.config}.yaml", *ALL, *case.flags]
        command += flags(output_dir=folder, max_steps=iterations)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(case.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            if case.ranks > 1:
                environment |= {name: str(value) for name, value in place.items()}
            ranks.append(
                subprocess.Popen(
                    [python(), *command],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        texts = [rank.communicate(timeout=500)[0] for rank in ranks]
        # 3: so short a run may look like reward hacking
        assert all(rank.returncode in (0, 3) for rank in ranks), texts[0][-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_did_what_its_settings_say(name, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    case = cases(*inputs)[name]
    train(case, tmp_path / "run")
    found = audit_of(tmp_path / "run").statements
    assert not [each for each in found if each.verdict == DIFFERS]
    assert sum(each.verdict == AGREES for each in found) >= 20
    unchecked = [f"{each.text}: {each.because}" for each in found if each.verdict == UNCHECKED]
    assert len(unchecked) == case.unchecked, unchecked
