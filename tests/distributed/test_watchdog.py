"""Tests of the watchdog: a run that hangs is reported with its stages, a healthy one prints
nothing.
"""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import pytest
import torch

from hyvideo.config.rules import check
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed import watchdog
from hyvideo.distributed.collectives import barrier
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.watchdog import Heartbeat, Watchdog, describe, num_reports
from hyvideo.trainer import Trainer
from tests.distributed.launch import launch

MODULE = "tests.distributed.test_watchdog"
HOST = socket.gethostname()
CPU = torch.device("cpu")
LIMIT = 2.0


# --- on several processes, each of which returns its stderr ---------------------------------------


@contextmanager
def stderr_in(path: Path):
    saved_stderr = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved_stderr, 2)


def watched(folder: str, behave) -> str:
    """Return the stderr of this rank's watchdog while ``behave(watchdog, mesh)`` runs."""
    mesh = ranks.start(1, CPU)
    barrier(mesh)
    path = Path(folder) / f"{mesh.rank}.err"
    with stderr_in(path):
        with Watchdog(mesh, LIMIT) as watchdog:
            behave(watchdog, mesh)
        assert watchdog._thread not in threading.enumerate()
    return path.read_text()


def train_without_hang(folder):
    def behave(watchdog, mesh):
        for iteration in range(1, 9):
            watchdog.enter("rollout", iteration)
            time.sleep(LIMIT / 4)
            barrier(mesh)

    return watched(folder, behave)


def sleep_in_reward(folder):
    def behave(watchdog, mesh):
        watchdog.enter("reward", 7)
        if mesh.rank == 1:
            time.sleep(2.5 * LIMIT)
        watchdog.enter("after reward", 7)
        barrier(mesh)

    return watched(folder, behave)


def stop_one_rank(folder):
    def behave(watchdog, mesh):
        watchdog.enter("update", 3)
        if mesh.rank == 2:
            time.sleep(0.5)
            waker = subprocess.Popen(["sh", "-c", f"sleep {3 * LIMIT}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.wait()
        barrier(mesh)

    return watched(folder, behave)


def finish_early(folder):
    def behave(watchdog, mesh):
        watchdog.enter("writing", 1)
        for _ in range(0 if mesh.rank == 1 else 6):
            watchdog.enter("sampling", 2)
            time.sleep(LIMIT / 4)

    return watched(folder, behave)


@pytest.fixture(scope="module", autouse=True)
def launched(tmp_path_factory):
    """The stderr of the ranks by behavior.

    These launches mostly wait, so they run beside the tests of this file.
    """
    with ThreadPoolExecutor(2) as pool:
        yield {
            behavior: pool.submit(
                launch, f"{MODULE}:{behavior}", num_ranks, str(tmp_path_factory.mktemp(behavior))
            )
            for behavior, num_ranks in {
                "sleep_in_reward": 2,
                "stop_one_rank": 3,
                "finish_early": 2,
            }.items()
        }


@pytest.mark.slow
def test_a_healthy_run_prints_nothing(tmp_path):
    assert launch(f"{MODULE}:train_without_hang", 2, str(tmp_path)) == ["", ""]


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture
def alone(mesh):
    return Watchdog(mesh, 0.4)


def test_one_process_reports_its_own_stage(alone, capfd):
    with alone:
        alone.enter("decode", 4)
        time.sleep(0.6)
    stderr = capfd.readouterr().err
    assert re.search(rf"^0 +{re.escape(HOST)} +decode +4 ", stderr, re.MULTILINE)
    assert "test_one_process_reports_its_own_stage" in stderr and stderr.count("Python stack") == 1


def test_a_limit_of_0_starts_no_thread_and_the_thread_ends_with_the_context(mesh, alone):
    with Watchdog(mesh, 0) as off:
        off.enter("rollout", 1)
        assert off._thread not in threading.enumerate()
    with alone:
        assert alone._thread in threading.enumerate()
    assert alone._thread not in threading.enumerate()


def test_changing_the_system_clock_raises_no_alarm(alone, capfd, monkeypatch):
    with alone:
        alone.enter("decode", 4)
        monkeypatch.setattr(watchdog.time, "time", lambda: 2e9)
        time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_without_the_store_a_rank_still_reports_itself(capfd, monkeypatch):
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("localhost", server.port, timeout=timedelta(seconds=2))
    monkeypatch.setattr(watchdog, "open_store", lambda mesh, timeout_s: client)
    with Watchdog(Mesh(rank=0, world_size=2, sp_size=1), 1.0) as running:
        running.enter("rollout", 2)
        time.sleep(0.2)
        del server
        time.sleep(1.2)
    stderr = capfd.readouterr().err
    assert "watchdog: rank 0 in one stage for more than 1 s" in stderr
    assert not re.search(r"^1 ", stderr, re.MULTILINE)


@pytest.mark.system
def test_an_unreachable_store_does_not_delay_the_end_of_the_run(monkeypatch, capfd):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(watchdog, "_CONNECT_S", 1.0)
    start = time.monotonic()
    with Watchdog(Mesh(rank=1, world_size=2, sp_size=1), 100.0):
        pass
    assert time.monotonic() - start < 3
    assert "watchdog" not in capfd.readouterr().err


def test_without_the_address_of_a_store_a_rank_still_reports_itself(capfd, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with Watchdog(Mesh(rank=1, world_size=2, sp_size=1), 0.2, unit="video") as running:
        running.enter("sampling", 3)
        time.sleep(0.5)
    assert (
        f"watchdog: rank 1 ({HOST}) has been in stage sampling of video 3 for"
        in capfd.readouterr().err
    )


def test_a_report_is_due_at_the_limit_and_when_the_time_has_doubled():
    reports = {
        seconds: num_reports(seconds, 10.0) for seconds in (0, 9.9, 10, 19.9, 20, 39, 45, 79, 80)
    }
    assert list(reports.values()) == [0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_a_rank_without_heartbeats_is_assumed_to_be_in_its_last_stage():
    alive, absent = Heartbeat("a", "update", 2, 30.0), Heartbeat("b", "reward", 1, 40.0)
    lines = describe({0: alive.after(1.0), 1: absent.after(50.0)}, 35, silent_after=5).splitlines()
    assert lines[0] == "watchdog: rank 1 in one stage for more than 35 s"
    assert lines[2].split() == ["0", "a", "update", "2", "31", "1", "s", "ago"]
    assert lines[3].split() == ["1", "b", "reward", "1", "90", "50", "s", "ago"]
    assert lines[-1] == "no heartbeat (stopped, exited or unreachable): rank 1"
    assert describe({0: alive}, 35, silent_after=5).splitlines()[-1] == "all of these ranks respond"


def test_a_stack_is_printed_once_per_stage_entry(mesh, capfd):
    with Watchdog(mesh, 0.2) as running:
        for _ in range(2):
            running.enter("reward", 1)
            time.sleep(0.5)
    assert capfd.readouterr().err.count("Python stack") == 2


# --- in a run -------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_run_reports_its_stages(tiny_config, mesh):
    stages = []
    config = tiny_config.with_settings(
        max_steps=1, validation_interval=1, valid_video_csv="assets/miniature/prompts/smoke.csv"
    )
    trainer = Trainer(
        config, mesh, CPU, on_stage=lambda stage, iteration: stages.append((stage, iteration))
    )
    trainer.train()
    assert stages[:5] == [*[("load", 0)] * 4, ("validation", 0)] and ("conditions", 1) in stages
    entered = [
        stage
        for stage, _ in groupby(stage for stage, _ in stages if not stage.startswith("after "))
    ]
    plan = trainer.run.inputs.plan
    passes = plan.num_trained_steps * plan.rollouts // config.loss.mini_batch_size_per_update
    assert stages.count(("update", 1)) == 1 + passes  # a long stage is reported in parts
    assert stages.count(("rollout", 1)) == 1 + config.rollout.grpo_sampling_steps
    assert stages.count(("validation", 0)) == 2 + 1 + config.record.validation_steps  # in one batch
    assert entered[1:5] == ["validation", "validation reward", "conditions", "rollout"]
    assert entered[5:11] == ["decode", "anchor", "reward", "record", "update", "validation"]
    assert entered[11:] == ["validation reward", "save", "end"]
    assert stages[stages.index(("reward", 1)) + 1] == ("after reward", 1)


def test_watchdog_seconds_must_be_below_collective_timeout(tiny_config):
    late = tiny_config.with_settings(watchdog_seconds=280.0, collective_timeout=300.0)
    check(late)
    check(late.with_settings(watchdog_seconds=270.0, batch_size=4), 2)
    check(late.with_settings(watchdog_seconds=0.0, batch_size=4), 2)
    with pytest.raises(
        ValueError,
        match="watchdog_seconds must be at most 0.9 of collective_timeout, .* got 280 and 300; lower",
    ):
        check(late, 2)
    with pytest.raises(ValueError, match="watchdog_seconds must not be negative, got -1"):
        check(tiny_config.with_settings(watchdog_seconds=-1.0))


# --- the ends of the launches ---------------------------------------------------------------------


def test_a_sleeping_rank_is_reported_with_its_stage_and_seconds(launched):
    main, sleeper = launched["sleep_in_reward"].result()
    # at the limit and when the time has doubled
    assert main.count("in one stage for more than 2 s") == 2
    first = main.split("all of these ranks respond")[0]
    row = re.search(rf"^1 +{re.escape(HOST)} +reward +7 +(\d+)", main, re.MULTILINE)
    assert LIMIT <= int(row[1]) <= 1.5 * LIMIT, main
    assert re.search(rf"^0 +{re.escape(HOST)} +after reward +7", first, re.MULTILINE), main
    assert "all of these ranks respond" in main
    assert "watchdog: rank 1" in sleeper and "stage reward of iteration 7" in sleeper
    assert sleeper.count("Python stack") == 1 and "in behave" in sleeper


def test_a_stopped_rank_is_reported_as_having_no_heartbeat(launched):
    main, other, _ = launched["stop_one_rank"].result()
    assert "no heartbeat (stopped, exited or unreachable): rank 2\n" in main
    assert re.search(
        rf"^2 +{re.escape(HOST)} +update +3 +\d+ +[2-9]\d* s ago$", main, re.MULTILINE
    ), main
    assert other.count("watchdog: rank 1") == 1 and "no heartbeat" not in other


def test_a_rank_that_has_ended_is_not_reported(launched):
    assert launched["finish_early"].result() == ["", ""]
