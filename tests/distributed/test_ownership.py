"""One life of a run has its folder: another that lives is respected, one that is over is succeeded and stays so."""

import json
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

from hyvideo.distributed import checkpoint, ownership
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import NotOwner, Ownership
from tests.forked import ROOT, python

ALONE = Mesh(0, 1, 1)
LIFE = """
import sys, time
from pathlib import Path
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.ownership import Ownership
with Ownership(Path(sys.argv[1]), Mesh(0, 1, 1), beat_s=0.05):
    print("lives", flush=True)
    time.sleep(60)
"""


def own(folder, **times):
    return Ownership(folder, ALONE, **{"beat_s": 0.05, "silence_s": 0.3} | times)


@pytest.fixture
def other(tmp_path):
    """Another process that has the folder."""
    process = subprocess.Popen([python(), "-c", LIFE, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "lives\n"
    yield process
    process.kill()
    process.communicate()


def test_a_life_that_goes_on_is_named_and_one_that_was_killed_is_succeeded_at_once(tmp_path, other):
    lock = tmp_path / ".owner"
    with pytest.raises(NotOwner, match=f"in use by process .* end that run, or name another output_dir.*{lock}"):
        own(tmp_path, silence_s=20).take()
    was = lock.read_text()
    os.kill(json.loads(was)["pid"], signal.SIGKILL)
    other.wait()
    began = time.monotonic()
    owner = own(tmp_path, silence_s=20)
    with owner:
        assert owner.holds() and lock.read_text() != was
    assert time.monotonic() - began < 10 and not lock.exists()


@pytest.mark.parametrize("text", ['{"host": "elsewhere", "namespace": "pid:[1]", "pid": 1, "life": "a"}', "{", "[1]"])
def test_a_life_on_another_host_is_over_when_its_heartbeat_is_silent(tmp_path, text):
    (tmp_path / ".owner").write_text(text)
    began = time.monotonic()
    owner = own(tmp_path)
    with owner:
        assert time.monotonic() - began >= 0.3
        owner.check()


def test_a_process_of_another_container_is_not_taken_for_gone(tmp_path):
    found, lock = (
        ownership._this_process() | {"namespace": "pid:[1]", "pid": 2**22 + 1, "life": "a"},
        tmp_path / ".owner",
    )
    lock.write_text(json.dumps(found))
    beat = threading.Timer(0.1, os.utime, (lock,))
    beat.start()
    with pytest.raises(NotOwner, match="in use"):
        own(tmp_path, silence_s=20).take()
    beat.join()


def test_a_life_that_comes_back_finds_itself_superseded_and_leaves_the_other_alone(tmp_path):
    first, second = own(tmp_path), own(tmp_path)
    with first:
        with second:
            with pytest.raises(NotOwner, match="another process of the run has taken .* this one ends"):
                first.check()
            second._ended.set()
            second._thread.join()
            lock = tmp_path / ".owner"
            text, when = lock.read_text(), lock.stat().st_mtime_ns
            time.sleep(0.15)  # some beats of the first
            assert lock.read_text() == text and lock.stat().st_mtime_ns == when
            first.__exit__()
            assert second.holds() and lock.exists()


def test_a_lock_that_was_taken_away_by_hand_ends_the_run(tmp_path):
    owner = own(tmp_path)
    with owner:
        (tmp_path / ".owner").unlink()
        with pytest.raises(NotOwner):
            owner.check()


def test_a_later_start_that_loads_is_refused_and_what_lived_through_its_load_is_seen(tmp_path):
    first, second = own(tmp_path), own(tmp_path)
    first.take()
    with second:
        pass  # has taken the folder, and is done
    with pytest.raises(NotOwner, match="another process"), first:
        pass


def test_hosts_of_one_name_and_namespace_are_told_apart_by_their_boot(tmp_path):
    gone = ownership._this_process() | {"pid": 2**22 + 1, "life": "a"}
    for boot, waits in ((gone["boot"], False), ("another", True)):
        (tmp_path / ".owner").write_text(json.dumps(gone | {"boot": boot}))
        assert own(tmp_path)._must_wait() is waits


def test_a_lock_that_cannot_be_read_is_refused_and_stays(tmp_path):
    lock = tmp_path / ".owner"
    with own(tmp_path):
        lock.unlink()
        lock.symlink_to(lock)  # as a file of another that the disk does not give
    assert lock.is_symlink()
    with pytest.raises(NotOwner, match=".owner' must be a file that can be read and written"):
        own(tmp_path).take()


def test_a_process_that_never_trains_ends_and_gives_the_folder_back(tmp_path):
    program = LIFE.replace("with ", "").replace("beat_s=0.05):", "beat_s=9).take()").split("    print")[0]
    subprocess.run([python(), "-c", program, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert not any(tmp_path.iterdir())


def state_and_weight(folder):
    targets = {"weight": torch.zeros(())}
    checkpoint.load_tensors(folder, targets)
    return checkpoint.read_state(folder)["of"], targets["weight"].item()


def test_two_writers_in_one_folder_make_no_mixed_checkpoint(tmp_path, capsys):
    first, second = own(tmp_path), own(tmp_path)
    with first, second:
        early, late = (
            CheckpointWriter(tmp_path, ALONE, keep=1, is_asynchronous=False, owner=owner) for owner in (first, second)
        )

        def meanwhile(folder):  # the earlier life has written its tensors; now the later one writes all of its own
            assert first.life in folder.name
            late.save(5, {"weight": torch.tensor(2.0)}, {"of": 2})

        early.save(5, {"weight": torch.tensor(1.0)}, {"of": 1}, meanwhile)
    assert early.last_failed and not late.last_failed
    assert "another process of the run has" in capsys.readouterr().err
    assert state_and_weight(tmp_path / "checkpoints" / "000005") == (2, 2.0)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000005", "latest"]


@pytest.mark.parametrize("at", ["rename", "replace"])
def test_a_life_that_is_succeeded_while_it_shows_a_checkpoint_renames_and_deletes_no_more(tmp_path, monkeypatch, at):
    first = own(tmp_path)
    with first:
        writer = CheckpointWriter(tmp_path, ALONE, keep=1, is_asynchronous=False, owner=first)
        writer.save(1, {"weight": torch.tensor(1.0)}, {})
        call, stolen = getattr(os, at), []

        def taken(*arguments):
            call(*arguments)
            if not stolen:
                stolen.append(1)
                (tmp_path / ".owner").write_text('{"life": "later"}')

        monkeypatch.setattr(os, at, taken)
        writer.save(2, {"weight": torch.tensor(2.0)}, {})
        assert writer.last_failed
    assert (tmp_path / "checkpoints" / "000001").is_dir()
    pointed = (tmp_path / "checkpoints" / "latest").read_text().strip()
    assert pointed == {"rename": "000001", "replace": "000002"}[at]
