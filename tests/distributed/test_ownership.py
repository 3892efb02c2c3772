"""Tests of the ownership of the output folder: live owners block, stale ones are replaced and
cannot come back.
"""

import json
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from hyvideo.distributed.ownership import NotOwner, Ownership

from hyvideo.distributed import checkpoint_loading, ownership
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.mesh import Mesh
from tests.forked import ROOT, python

ALONE = Mesh.single()
OWNER = """
import sys, time
from pathlib import Path
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership
with Ownership(Path(sys.argv[1]), Mesh.single(), beat_s=0.05):
    print("ready", flush=True)
    time.sleep(60)
"""


def ownership_of(folder, **times):
    return Ownership(folder, ALONE, **{"beat_s": 0.05, "silence_s": 0.3} | times)


@pytest.fixture
def other_process(tmp_path):
    """Start another process that owns the folder."""
    process = subprocess.Popen(
        [python(), "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_live_owner_raises_an_error_and_a_killed_one_is_replaced_at_once(tmp_path, other_process):
    lock = tmp_path / ".owner"
    with pytest.raises(
        NotOwner,
        match=f"in use by process .* stop that run or choose another output_dir; deleting {lock}",
    ):
        ownership_of(tmp_path, silence_s=20).take()
    previous = lock.read_text()
    os.kill(json.loads(previous)["pid"], signal.SIGKILL)
    other_process.wait()
    began = time.monotonic()
    owner = ownership_of(tmp_path, silence_s=20)
    with owner:
        assert owner.is_held() and lock.read_text() != previous
    assert time.monotonic() - began < 10 and not lock.exists()


@pytest.mark.parametrize(
    "text", ['{"host": "elsewhere", "namespace": "pid:[1]", "pid": 1, "token": "a"}', "{", "[1]"]
)
def test_an_owner_on_another_host_is_replaced_when_its_heartbeat_stops(tmp_path, text):
    (tmp_path / ".owner").write_text(text)
    began = time.monotonic()
    owner = ownership_of(tmp_path)
    with owner:
        assert time.monotonic() - began >= 0.3
        owner.check()


def test_a_process_in_another_container_is_not_considered_dead(tmp_path):
    found, lock = (
        ownership._this_process() | {"namespace": "pid:[1]", "pid": 2**22 + 1, "token": "a"},
        tmp_path / ".owner",
    )
    lock.write_text(json.dumps(found))
    beat = threading.Timer(0.1, os.utime, (lock,))
    beat.start()
    with pytest.raises(NotOwner, match="in use"):
        ownership_of(tmp_path, silence_s=20).take()
    beat.join()


def test_a_previous_owner_that_reappears_stops_and_does_not_touch_the_new_owner(tmp_path):
    first, second = ownership_of(tmp_path), ownership_of(tmp_path)
    with first:
        with second:
            with pytest.raises(NotOwner, match="another process now owns .* this process stops"):
                first.check()
            second._ended.set()
            second._thread.join()
            lock = tmp_path / ".owner"
            text, when = lock.read_text(), lock.stat().st_mtime_ns
            time.sleep(0.15)  # some heartbeats of the first
            assert lock.read_text() == text and lock.stat().st_mtime_ns == when
            first.__exit__()
            assert second.is_held() and lock.exists()


def test_deleting_the_owner_file_stops_the_run(tmp_path):
    owner = ownership_of(tmp_path)
    with owner:
        (tmp_path / ".owner").unlink()
        with pytest.raises(NotOwner):
            owner.check()


def test_a_process_that_took_and_released_the_folder_in_between_is_detected(tmp_path):
    first, second = ownership_of(tmp_path), ownership_of(tmp_path)
    first.take()
    with second:
        pass  # takes and releases the folder
    with pytest.raises(NotOwner, match="another process"), first:
        pass


def test_hosts_with_equal_names_and_namespaces_are_distinguished_by_boot_id(tmp_path):
    gone = ownership._this_process() | {"pid": 2**22 + 1, "token": "a"}
    for boot, waits in ((gone["boot"], False), ("another", True)):
        (tmp_path / ".owner").write_text(json.dumps(gone | {"boot": boot}))
        assert ownership_of(tmp_path)._must_wait() is waits


def test_an_unreadable_owner_file_raises_an_error_and_is_kept(tmp_path):
    lock = tmp_path / ".owner"
    with ownership_of(tmp_path):
        lock.unlink()
        lock.symlink_to(lock)  # unreadable, like a file on an unresponsive disk
    assert lock.is_symlink()
    with pytest.raises(NotOwner, match="the owner file .*.owner' must be readable and writable"):
        ownership_of(tmp_path).take()


def test_a_pipe_as_owner_file_raises_an_error(tmp_path):
    os.mkfifo(tmp_path / ".owner")
    with pytest.raises(NotOwner, match="the owner file .*got: it is a pipe"):
        ownership_of(tmp_path).take()


def test_a_process_that_exits_without_training_releases_the_folder(tmp_path):
    program = (
        OWNER.replace("with ", "")
        .replace("beat_s=0.05):", "beat_s=9).take()")
        .split("    print")[0]
    )
    subprocess.run([python(), "-c", program, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert not any(tmp_path.iterdir())


def state_and_weight(folder):
    targets = {"weight": torch.zeros(())}
    checkpoint_loading.load_tensors(folder, targets)
    return checkpoint_loading.read_state(folder)["writer"], targets["weight"].item()


def test_two_writers_in_one_folder_never_mix_a_checkpoint(tmp_path, capsys):
    first, second = ownership_of(tmp_path), ownership_of(tmp_path)
    with first, second:
        early, late = (
            CheckpointWriter(
                tmp_path, ALONE, keep=1, is_asynchronous=False, owner=owner, run="0f0f0f0f"
            )
            for owner in (first, second)
        )

        # the first has written its tensors; now the second writes all of its checkpoint
        def meanwhile(folder):
            assert first.token in folder.name
            late.save(5, {"weight": torch.tensor(2.0)}, {"writer": 2})

        early.save(5, {"weight": torch.tensor(1.0)}, {"writer": 1}, meanwhile)
    assert early.last_failed and not late.last_failed
    assert "another process now owns" in capsys.readouterr().err
    assert state_and_weight(tmp_path / "checkpoints" / "000005") == (2, 2.0)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "000005",
        "latest",
    ]


@pytest.mark.parametrize("at", ["rename", "replace"])
def test_an_owner_replaced_while_publishing_a_checkpoint_renames_and_deletes_nothing_more(
    tmp_path, monkeypatch, at
):
    first = ownership_of(tmp_path)
    with first:
        writer = CheckpointWriter(
            tmp_path, ALONE, keep=1, is_asynchronous=False, owner=first, run="0f0f0f0f"
        )
        writer.save(1, {"weight": torch.tensor(1.0)}, {})
        call, taken = getattr(os, at), []

        def steal(*arguments):
            call(*arguments)
            if not taken:
                taken.append(1)
                (tmp_path / ".owner").write_text('{"token": "later"}')

        monkeypatch.setattr(os, at, steal)
        writer.save(2, {"weight": torch.tensor(2.0)}, {})
        assert writer.last_failed
    assert (tmp_path / "checkpoints" / "000001").is_dir()
    pointed = (tmp_path / "checkpoints" / "latest").read_text().strip()
    assert pointed == {"rename": "000001", "replace": "000002"}[at]
