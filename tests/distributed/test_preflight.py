"""Tests of preflight: ranks that differ or do not answer are reported before a run starts."""

import dataclasses
import os
import shutil
import socket
import subprocess
import time

import pytest
import torch

from hyvideo.config.identity import named_files
from hyvideo.data.files import write_problem
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.preflight import (
    ABSENT,
    code_hash,
    file_hash,
    inspect_node,
    problems_of,
    table,
    try_all_reduce,
)
from hyvideo.distributed.rank_agreement import name_ranks
from tests.forked import ROOT, python

# The code in TEST_BEFORE runs first; it simulates a fault on that rank's node. The first argument
# is the timeout.
PROGRAM = """
import os, sys, time
exec(os.environ["TEST_BEFORE"])
import torch
from hyvideo.config import processes
from hyvideo.config.command_line import parse
from hyvideo.config.identity import named_files
from hyvideo.data.cli import exit_on_error
from hyvideo.distributed.mesh import Mesh, stop
from hyvideo.distributed.preflight import preflight

with exit_on_error("preflight"):
    settings = parse(sys.argv[2:]).config.flat()
    ranks = Mesh(processes.rank(), processes.world_size(), 1)
    preflight(settings, named_files(settings), ranks, torch.device("cpu"), timeout_s=float(sys.argv[1]))
stop()
"""

STARTED = "import torch\nfrom hyvideo.distributed import mesh\nmesh.start(1, torch.device('cpu'))"
# Import times differ between processes by seconds; after this barrier a short timeout is
# sufficient.
MEET = """
import pathlib, hyvideo.distributed.preflight
(pathlib.Path({folder!r}) / os.environ["RANK"]).touch()
while len(list(pathlib.Path({folder!r}).iterdir())) < {count}:
    time.sleep(0.02)
"""


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start(rank, world_size, port, timeout, arguments, before):
    addresses = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "TEST_BEFORE": before,
    }
    places = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        python(),
        "-c",
        PROGRAM,
        str(timeout),
        "--config",
        "configs/smoke.yaml",
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | addresses | places,
    )


def run_preflight(world_size, *arguments, timeout=60, extra=None, before=None, waited_for=None):
    """Return exit codes, stdout and stderr of the ranks in ``waited_for``; ``extra`` and ``before``
    are by rank.
    """
    extra, before, port = extra or {}, before or {}, free_port()
    processes = [
        start(
            rank,
            world_size,
            port,
            timeout,
            [*arguments, *extra.get(rank, [])],
            before.get(rank, ""),
        )
        for rank in range(world_size)
    ]
    try:
        waited_for = range(world_size) if waited_for is None else waited_for
        outputs = [processes[rank].communicate(timeout=60) for rank in waited_for]
        return [processes[rank].returncode for rank in waited_for], *map("".join, zip(*outputs))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "before",
    ["", pytest.param(STARTED, marks=pytest.mark.slow)],
    ids=["before the process group", "after the process group"],
)
def test_compatible_ranks_are_shown_in_a_table(tmp_path, before):
    codes, out, err = run_preflight(
        2, "--batch_size", 4, "--output_dir", tmp_path, before={0: before, 1: before}
    )
    assert codes == [0, 0], err
    header, row = out.splitlines()
    assert "free disk" in header and row.split()[:5] == [
        socket.gethostname(),
        "0-1",
        "2",
        "x",
        "cpu",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_all_problems_are_in_one_message_and_every_rank_exits_with_2(tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt\na red circle moves left\n")
    flags = ["--learning_rate", "0.5", "--prompts_csv", tmp_path / "prompts.csv"]
    codes, _, err = run_preflight(
        3, "--batch_size", 4, "--output_dir", tmp_path / "run", extra={1: flags}
    )
    assert codes == [2, 2, 2]
    host = socket.gethostname()
    difference = (
        f"learning_rate must be the same on all ranks, got 0.0001 on ranks 0, 2 ({host}); 0.5 on "
        f"rank 1 ({host})"
    )
    assert err.count(difference) == 1
    assert "the file of prompts_csv must be the same" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_reported(tmp_path):
    (tmp_path / "here").mkdir()
    meet = MEET.format(folder=str(tmp_path / "here"), count=2)
    arguments = ["--batch_size", 4, "--output_dir", tmp_path / "run"]
    before = {0: meet, 1: "time.sleep(100)", 2: meet}
    codes, _, err = run_preflight(3, *arguments, timeout=2, before=before, waited_for=[0, 2])
    assert codes == [2, 2]
    assert (
        err.count("preflight: rank 1 of 3 did not answer within 2 s") == 1
        and "Traceback" not in err
    )


@pytest.mark.slow
def test_a_main_rank_that_does_not_answer_is_reported_by_the_next(tmp_path):
    arguments = ["--batch_size", 4, "--output_dir", tmp_path]
    codes, _, err = run_preflight(
        2, *arguments, timeout=2, before={0: "time.sleep(100)"}, waited_for=[1]
    )
    assert (
        codes == [2]
        and err.count("preflight: rank 0 did not answer at localhost:") == 1
        and "Traceback" not in err
    )


def test_a_collective_that_hangs_fails_or_returns_a_wrong_sum_is_reported(monkeypatch):
    two = Mesh(rank=0, world_size=2, sp_size=1)

    def outcome(all_reduce):
        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        return try_all_reduce(two, torch.device("cpu"), timeout_s=0.2)

    def fail(tensor):
        raise RuntimeError("connection\nrefused")

    assert outcome(lambda tensor: tensor.fill_(3)) == ""
    assert (
        outcome(lambda tensor: time.sleep(5))
        == "the all-reduce on cpu failed: did not finish within 0.2 s"
    )
    assert outcome(fail) == "the all-reduce on cpu failed: connection refused"
    assert outcome(lambda tensor: tensor) == "the all-reduce on cpu failed: returned 1 instead of 3"


@pytest.fixture
def reports(tiny_config):
    local = inspect_node(
        tiny_config.flat(), named_files(tiny_config.flat()), 0, torch.device("cpu")
    )
    gpu = "GPU with 80 GiB"
    return [
        dataclasses.replace(local, rank=rank, host=f"node{rank // 2}", device=gpu, gpu_id=str(rank))
        for rank in range(4)
    ]


def test_equal_nodes_have_no_problems(reports):
    assert problems_of(reports) == []
    assert table(reports).splitlines()[1].split()[:6] == ["node0", "0-1", "2", "x", "GPU", "with"]


@pytest.mark.parametrize(
    "key, value, message",
    [
        (
            "the project's Python code",
            "0123",
            "the project's Python code must be the same on all ranks, got ",
        ),
        ("the version of torch", "1.0", "; 1.0 on rank 3 (node1)"),
        ("the transformer's files", ABSENT, "the transformer's files must be the same"),
        ("the kind of device", "cuda", "the kind of device must be the same"),
        (
            "the setting learning_rate",
            "0.5",
            "the setting learning_rate must be the same on all ranks, got 0.0001 on",
        ),
        ("the setting of tomorrow", "1", "must be the same on all ranks, got absent on ranks 0-2"),
    ],
)
def test_a_difference_is_reported_with_rank_name_and_values(reports, key, value, message):
    reports[3] = dataclasses.replace(reports[3], compared=reports[3].compared | {key: value})
    (problem,) = problems_of(reports)
    assert message in problem and f"{value} on rank 3 (node1)" in problem


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"gpu_id": "2"}, "ranks 2-3 (node1) share one GPU"),
        ({"problems": ["no room"]}, "rank 3 (node1): no room"),
    ],
)
def test_a_problem_is_reported_with_its_rank(reports, changed, message):
    reports[3] = dataclasses.replace(reports[3], **changed)
    (problem,) = problems_of(reports)
    assert problem.startswith(message)


def test_the_table_shows_different_gpus_and_the_smallest_free_disk(reports):
    reports[3] = dataclasses.replace(reports[3], device="other GPU with 40 GiB", free_disk=2**31)
    row = table(reports).splitlines()[2]
    assert "1 x GPU with 80 GiB, 1 x other GPU with 40 GiB" in row and row.endswith(" 2 GiB")
    assert problems_of(reports) == []


def test_a_changed_or_renamed_file_changes_the_hash_of_the_code(tmp_path):
    (tmp_path / "hyvideo").mkdir()
    (tmp_path / "hyvideo" / "a.py").write_text("x = 1\n")
    first = code_hash(tmp_path)
    shutil.move(tmp_path / "hyvideo" / "a.py", tmp_path / "hyvideo" / "b.py")
    second = code_hash(tmp_path)
    (tmp_path / "hyvideo" / "b.py").write_text("x = 2\n")
    assert len({first, second, code_hash(tmp_path)}) == 3


def test_files_in_settings_are_compared_by_content(tiny_config, tmp_path):
    file = tmp_path / "prompts.csv"
    settings = tiny_config.with_settings(prompts_csv=str(file)).flat()
    files = named_files(settings)
    assert files["prompts_csv"] == [file] and "reward_config" not in files
    assert file_hash(file) == ABSENT
    file.write_text("prompt\na\n")
    first = file_hash(file)
    file.write_text("prompt\nb\n")
    report = inspect_node(settings, files, 0, torch.device("cpu"))
    assert report.compared["the file of prompts_csv"] == file_hash(file) != first


def test_the_write_check_leaves_no_file_behind(tmp_path):
    assert write_problem(tmp_path) is None and write_problem(tmp_path / "new" / "run") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "is not a folder" in write_problem(tmp_path / "file" / "run")
    assert (
        write_problem("/proc/run") == "no file can be created in /proc: No such file or directory"
    )


def test_consecutive_ranks_are_named_as_ranges():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([9, 0, 1, 2]) == "ranks 0-2, 9"
