"""The lease of a folder: a live owner blocks, a dead one is replaced and cannot come back."""

import os
import signal
import subprocess
import time

import pytest
import torch

from hyvideo.checkpoints import format, loading
from hyvideo.checkpoints.writer import CheckpointWriter
from hyvideo.distributed.mesh import Mesh
from hyvideo.files import run_folder
from hyvideo.files.run_folder import LEASE, Lease, NotOwner
from tests.forked import ROOT, python


def test_a_live_owner_is_named_and_a_killed_one_is_replaced_at_once(tmp_path, in_use):
    with in_use(tmp_path) as pid:
        with pytest.raises(NotOwner, match=f"process {pid} on "):
            Lease(tmp_path).__enter__()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        began = time.monotonic()
        with Lease(tmp_path) as lease:
            lease.check()
        assert time.monotonic() - began < 1
    assert not any(tmp_path.iterdir())


def test_an_owner_that_gives_no_sign_of_life_is_replaced_also_if_it_comes_back(tmp_path, in_use):
    with in_use(tmp_path) as pid:
        os.kill(pid, signal.SIGSTOP)  # stands for a machine that is gone
        with Lease(tmp_path) as lease:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)  # some heartbeats of the first
            lease.check()


def test_a_later_lease_of_the_process_replaces_the_first_which_does_not_touch_it(tmp_path):
    first = Lease(tmp_path).__enter__()
    with Lease(tmp_path) as second:
        with pytest.raises(NotOwner, match=LEASE):
            first.check()
        first.__exit__()
        second.check()
    assert not any(tmp_path.iterdir())


def test_a_deleted_lease_stops_the_owner(tmp_path):
    with Lease(tmp_path) as lease:
        (tmp_path / LEASE).unlink()
        with pytest.raises(NotOwner, match=LEASE):
            lease.check()


def test_a_lease_that_a_power_cut_has_emptied_or_cut_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LEASE_S", 1.2)
    (tmp_path / LEASE).write_text("half a rec")
    with Lease(tmp_path) as lease:
        lease.check()


def test_a_process_that_ends_releases_the_folder(tmp_path):
    program = "from hyvideo.files.run_folder import Lease; import pathlib, sys\n"
    program += "lease = Lease(pathlib.Path(sys.argv[1])).__enter__()"
    subprocess.run([python(), "-c", program, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert not any(tmp_path.iterdir())


# --- two writers ----------------------------------------------------------------------------------


def writer_of(lease):
    return CheckpointWriter(
        lease.folder,
        Mesh.single(),
        keep=1,
        is_asynchronous=False,
        check_owner=lease.check,
        run="0f0f0f0f",
    )


def test_two_writers_in_one_folder_never_mix_a_checkpoint(tmp_path, capsys):
    first = Lease(tmp_path).__enter__()
    with Lease(tmp_path) as second:
        early, late = writer_of(first), writer_of(second)

        # the first has written its tensors; now the second writes all of its checkpoint
        def meanwhile(_):
            late.save(5, {"weight": torch.tensor(2.0)}, {"writer": 2})

        early.save(5, {"weight": torch.tensor(1.0)}, {"writer": 1}, meanwhile)
    assert early.last_failed and not late.last_failed
    assert "another process" in capsys.readouterr().err
    (folder,) = (tmp_path / "checkpoints").iterdir()
    targets = {"weight": torch.zeros(())}
    loading.load_tensors(folder, targets)
    assert targets["weight"] == 2 and format.read_state(folder) == {"writer": 2}


def test_a_writer_that_loses_the_lease_publishes_and_deletes_nothing_more(tmp_path):
    with Lease(tmp_path) as lease:
        writer = writer_of(lease)
        writer.save(1, {"weight": torch.tensor(1.0)}, {})
        (tmp_path / LEASE).unlink()
        writer.save(2, {"weight": torch.tensor(2.0)}, {})
    assert writer.last_failed
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]
