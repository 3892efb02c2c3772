"""Tests of checkpoints: round trip, atomicity, corruption, and faults on one rank."""

import contextlib
import errno
import io
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hyvideo.checkpoints import format, loading
from hyvideo.checkpoints import writer as checkpoint_writer
from hyvideo.checkpoints.reader import SafeReader, read_metadata, read_shapes
from hyvideo.checkpoints.writer import CheckpointWriter
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import full_tensor, local_shard
from hyvideo.files import files, run_folder
from hyvideo.files.run_folder import RunRecord
from hyvideo.training.output_folder import find_start
from tests.distributed.launch import launch

ALONE = Mesh.single()
RUN = "0f0f0f0f"  # identity of the run in these tests
STATE = {
    "run": RUN,
    "iteration": 2,
    "update": 2,
    "anchor_age": 0,
    "kl_coefficient": {"value": 0.1, "num_updates": 3, "recent": []},
    "health": {"bad_in_a_row": 0, "norms": [], "last_outlier": 0},
    "metrics": {},
    "rollouts": 4,
    "settings": {},
    "inputs": {},
}


def save(folder, iteration, keep=0, is_asynchronous=False, **tensors):
    writer = CheckpointWriter(folder, ALONE, keep=keep, is_asynchronous=is_asynchronous, run=RUN)
    tensors = tensors or {"policy": torch.arange(3.0)}
    path = writer.save(iteration, tensors, STATE | {"iteration": iteration})
    writer.wait()
    return path


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_checkpoint_restores_the_saved_tensors_and_state(tmp_path, is_asynchronous):
    weight = torch.arange(6.0).view(2, 3)
    writer = CheckpointWriter(tmp_path, ALONE, keep=0, is_asynchronous=is_asynchronous, run=RUN)
    folder = writer.save(7, {"weight": weight, "step": torch.tensor(4.0)}, {"iteration": 7})
    if is_asynchronous:
        weight.add_(1)  # training continues
    writer.wait()
    assert format.read_state(folder) == {"iteration": 7}
    targets = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16), "step": torch.tensor(0.0)}
    loading.load_tensors(folder, targets)
    assert targets["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and targets["step"] == 4


def test_the_writing_thread_uses_no_gpu(tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("this would use the first GPU on every rank")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    loading.load_tensors(save(tmp_path, 1, weight=torch.zeros(3)), {"weight": torch.zeros(3)})


def save_without_shared_folder(folder):
    """Save on ranks that share no folder; return the printed error, seconds, and the number of
    complete checkpoints.
    """
    import time

    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(1, torch.device("cpu"), timeout=60)
    rank_folder = Path(folder) / str(mesh.rank)
    writer = CheckpointWriter(rank_folder, mesh, keep=0, is_asynchronous=True, timeout=60, run=RUN)
    writer.save(1, {"a": torch.zeros(3), "b": torch.zeros(4)}, {})
    start = time.perf_counter()
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        while writer._pending is not None:
            writer.check()
    assert writer.last_failed
    return (
        stderr.getvalue(),
        time.perf_counter() - start,
        len(format.complete(rank_folder)),
    )


def test_nodes_without_a_shared_folder_report_it_at_once_and_leave_no_checkpoint(tmp_path):
    (main, *first), (other, *second) = launch(
        "tests.checkpoints.test_checkpoint:save_without_shared_folder", 2, str(tmp_path)
    )
    assert "checkpoint NOT WRITTEN" in main and not other  # printed once
    assert "output_dir must be on a file system that all nodes share" in main
    assert all(seconds < 30 and complete == 0 for seconds, complete in (first, second))


def save_twice(folder):
    """Save twice with a fault on rank 1 in the first save; return the failures and the complete
    checkpoints.
    """
    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(1, torch.device("cpu"), timeout=30)
    digest_files = checkpoint_writer.digest_files

    def fail(*_, **__):
        raise OSError("the disk does not answer")

    if mesh.rank == 1:
        checkpoint_writer.digest_files = fail
    writer = CheckpointWriter(Path(folder), mesh, keep=0, is_asynchronous=True, timeout=30, run=RUN)
    found = []
    for iteration in (1, 2):
        writer.save(iteration, {"a": torch.zeros(3), "b": torch.zeros(4)}, {})
        writer.wait()
        found.append(writer.last_failed)
        checkpoint_writer.digest_files = digest_files
        torch.distributed.barrier()
    return found, [path.name for path in format.complete(Path(folder))]


def test_a_failure_on_one_rank_loses_only_one_checkpoint(tmp_path):
    for found in launch("tests.checkpoints.test_checkpoint:save_twice", 2, str(tmp_path)):
        assert found == [[True, False], ["000002"]]


def test_a_missing_tensor_or_a_wrong_shape_is_reported(tmp_path):
    folder = save(tmp_path, 1, weight=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="has no tensor bias"):
        loading.load_tensors(folder, {"bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\), but \(2, 3\) in checkpoint"):
        loading.load_tensors(folder, {"weight": torch.zeros(3, 2)})


def test_corrupted_metadata_raises_an_error(tmp_path):
    folder = save(tmp_path, 1)
    metadata = folder / "tensors" / ".metadata"
    metadata.write_bytes(b"no")
    with pytest.raises(ValueError, match="metadata"):
        loading.load_tensors(folder, {"policy": torch.zeros(3)})


class Malicious:
    def __reduce__(self):
        import os

        return os.system, ("touch hacked",)


def test_metadata_cannot_run_code_or_refer_to_files_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = save(tmp_path, 1) / "tensors"
    metadata = read_metadata(tensors)
    (tensors / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match="system is not allowed"):
        read_shapes(tensors)
    assert not (tmp_path / "hacked").exists()
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"
    (tensors / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside its folder"):
        read_shapes(tensors)


def load_each(folder, cases):
    return [load_among_four(Path(folder) / str(number), *case) for number, case in enumerate(cases)]


def load_among_four(folder, is_sharded, dp_replicate, is_corrupted):
    """Return the number of elements that this rank reads and holds, whether they are correct, and
    the error.
    """
    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(1, torch.device("cpu"), dp_replicate=dp_replicate, timeout=60)
    # The second has rows for some ranks only; the last is not sharded, like an optimizer's step
    # count.
    saved = {
        "a": torch.arange(24.0).view(8, 3),
        "b": torch.arange(5.0),
        "c": torch.arange(36.0).view(4, 9),
    }
    saved |= {"d": torch.arange(8.0), "e": torch.tensor(7.0)}
    placements = [Replicate(), Shard(0)] if dp_replicate > 1 else [Shard(0)]

    def spread(tensor):
        is_whole = not is_sharded or tensor.ndim == 0
        return tensor.clone() if is_whole else distribute_tensor(tensor, mesh.shards, placements)

    writer = CheckpointWriter(folder, mesh, keep=0, is_asynchronous=False, timeout=60, run=RUN)
    target = writer.save(1, {name: spread(tensor) for name, tensor in saved.items()}, {})
    if is_corrupted and mesh.is_main:
        *_, file = sorted((target / "tensors").glob("*.distcp"))  # some ranks read nothing from it
        file.write_bytes(file.read_bytes()[:500])
    torch.distributed.barrier()
    read, read_data = [], SafeReader.read_data

    def counted(reader, plan, planner):
        read.extend(item.lengths.numel() for item in plan.items)
        return read_data(reader, plan, planner)

    SafeReader.read_data = counted
    found, message = {name: spread(torch.zeros_like(tensor)) for name, tensor in saved.items()}, ""
    try:
        loading.load_tensors(target, found, mesh)
    except ValueError as error:
        message = str(error)
    SafeReader.read_data = read_data
    is_right = all(torch.equal(full_tensor(found[name]), tensor) for name, tensor in saved.items())
    return (
        sum(read),
        sum(local_shard(tensor).numel() for tensor in found.values()),
        is_right,
        message,
    )


def test_replicated_tensors_are_read_once_and_corruption_is_reported_on_all_ranks(tmp_path):
    """The cases are: not sharded, one model sharded over four ranks, and two model replicas."""
    cases = [(False, 1, False), (True, 1, False), (True, 2, False), (True, 2, True)]
    results = launch("tests.checkpoints.test_checkpoint:load_each", 4, str(tmp_path), cases)
    *intact, corrupted = ([*zip(*by_rank)] for by_rank in zip(*results))
    for (read, held, is_right, messages), copies in zip(intact, (4, 1, 2)):
        assert all(is_right) and set(messages) == {""}
        assert sum(read) == sum(held) / copies and (copies == 1 or max(read) < max(held))
    (message,) = set(corrupted[-1])
    assert "000001 cannot be read" in message


def newest(folder):
    """Return the name of the checkpoint that the run in a folder resumes."""
    run_folder.write_record(folder, RunRecord(run=RUN, has_checkpoint=True))
    return find_start(folder, "auto", ALONE).checkpoint.name


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_only_the_newest_are_kept(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration, keep=2)
    assert names(tmp_path) == ["000004", "000006"]


def test_everything_after_the_resumed_iteration_is_removed(tmp_path):
    for iteration in (2, 4):
        save(tmp_path, iteration)
        run_folder.claim(tmp_path / "rollouts" / f"{iteration:06d}", RUN)
    run_folder.remove_after(tmp_path, 2, RUN)
    format.remove_checkpoints_after(tmp_path, 2, RUN)
    assert [path.name for path in format.complete(tmp_path)] == ["000002"]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["000002"]


def test_a_failed_write_is_reported_and_earlier_checkpoints_are_kept(tmp_path, monkeypatch, capsys):
    save(tmp_path, 2)

    def crash(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.dcp, "save", crash)
        save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["000002"]  # partial files are removed
    assert "checkpoint NOT WRITTEN (OSError: disk full)" in capsys.readouterr().err
    save(tmp_path, 4)
    assert names(tmp_path) == ["000002", "000004"]


def test_a_checkpoint_is_synced_before_it_is_visible_and_before_an_older_one_is_deleted(
    tmp_path, monkeypatch
):
    events = []

    def traced(name, call, path_of):
        def run(*arguments, **options):
            events.append((name, str(path_of(arguments[0]))))
            return call(*arguments, **options)

        monkeypatch.setattr(os, name, run)

    save(tmp_path, 1)
    traced(
        "fsync",
        os.fsync,
        lambda file: os.readlink(f"/proc/self/fd/{file if type(file) is int else file.fileno()}"),
    )
    for name in ("rename", "replace"):
        traced(name, getattr(os, name), lambda path: path)
    target = save(tmp_path, 2, keep=1)
    root = target.parent
    partial = next(path for name, path in events if name == "replace")
    published = events.index(("replace", partial))
    hidden = events.index(("rename", str(root / "000001")))
    synced = {path for name, path in events[:published] if name == "fsync"}
    assert synced >= {
        str(Path(partial) / path.relative_to(target)) for path in (target, *target.rglob("*"))
    }
    assert ("fsync", str(root)) in events[published:hidden]


def test_a_kill_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 4, keep=1)
    assert len(names(tmp_path)) == 2 and newest(tmp_path) == "000002"
    format.remove_checkpoints_after(tmp_path, 2, RUN)
    assert names(tmp_path) == ["000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_the_new_one_is_written(
    tmp_path, monkeypatch, capsys
):
    save(tmp_path, 2)

    rmtree = run_folder.shutil.rmtree

    def fail(folder, **options):
        if folder.name.startswith(".000002."):
            raise PermissionError(1, "Operation not permitted", str(folder))
        rmtree(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.shutil, "rmtree", fail)
        writer = CheckpointWriter(tmp_path, ALONE, keep=1, is_asynchronous=False, run=RUN)
        writer.save(4, {"policy": torch.zeros(3)}, {})
    assert not writer.last_failed
    stderr = capsys.readouterr().err
    assert (
        "000002 NOT DELETED" in stderr
        and "Operation not permitted" in stderr
        and "NOT WRITTEN" not in stderr
    )
    assert "000004" in names(tmp_path)


def test_a_renamed_copy_is_neither_resumed_nor_removed(tmp_path):
    copy = save(tmp_path, 2).rename(tmp_path / "checkpoints" / "000002-good")
    writer = CheckpointWriter(tmp_path, ALONE, keep=1, is_asynchronous=False, run=RUN)
    for iteration in (1, 3):
        writer.save(iteration, {"policy": torch.zeros(3)}, {})
    assert copy.is_dir() and [path.name for path in format.complete(tmp_path)] == ["000003"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (
            lambda folder: flip(next((folder / "tensors").glob("*.distcp"))),
            "the contents of tensors/.* have changed",
        ),
        (lambda folder: (folder / "digests.json").write_text("{}"), "digests.json is incomplete"),
    ],
)
def test_a_corrupted_checkpoint_is_reported_kept_and_not_used(tmp_path, capsys, corrupt, message):
    for iteration in (2, 4):
        save(tmp_path, iteration, weight=torch.arange(1000.0))
    corrupt(tmp_path / "checkpoints" / "000004")
    with pytest.raises(ValueError, match="checkpoints/000004"):
        find_start(tmp_path / "new", str(tmp_path / "checkpoints" / "000004"), ALONE)
    assert newest(tmp_path) == "000002"
    assert re.search(f"000004 is corrupted: {message}", capsys.readouterr().err)
    assert names(tmp_path) == ["000002", "000004.corrupted"]
    corrupt(tmp_path / "checkpoints" / "000002")
    with pytest.raises(ValueError, match="checkpoints/000002"):
        newest(tmp_path)
    assert names(tmp_path) == ["000002", "000004.corrupted"]


def test_a_run_that_began_with_a_checkpoint_begins_with_it_again_until_it_has_its_own(tmp_path):
    began_with = save(tmp_path / "first", 2)
    folder = tmp_path / "second"
    run_folder.write_record(folder, RunRecord(run="2", started_from=str(began_with)))
    for named in ("auto", str(began_with)):
        assert find_start(folder, named, ALONE).checkpoint == began_with
    shutil.move(began_with, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="first/checkpoints/000002"):
        find_start(folder, "auto", ALONE)
    own = save(folder, 3)
    assert find_start(folder, "auto", ALONE).checkpoint == own


def test_a_file_that_cannot_be_read_stops_the_run_and_is_not_treated_as_corrupted(
    tmp_path, monkeypatch
):
    for iteration in (2, 4):
        save(tmp_path, iteration)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(format, "digest_file", fail)
        with pytest.raises(OSError, match="000004"):
            newest(tmp_path)
    assert newest(tmp_path) == "000004"


def test_an_unreadable_checkpoints_folder_is_not_treated_as_empty(tmp_path, monkeypatch):
    save(tmp_path, 2)

    def fail(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="checkpoints"):
        newest(tmp_path)


def find_with_a_fault(folder):
    """Return the error on two ranks if rank 1 cannot read a file of the newest checkpoint, and the
    checkpoint that is used if rank 1 does not see the file.
    """
    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(1, torch.device("cpu"), timeout=30)
    digest_file = format.digest_file
    found = []
    for number in (errno.EIO, errno.ENOENT):

        def fail(path, number=number):
            if mesh.rank == 1 and "000004/" in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return digest_file(path)

        format.digest_file = fail
        try:
            found.append(find_start(Path(folder), "auto", mesh).checkpoint.name)
        except OSError as error:
            found.append(str(error))
    return found


def test_a_file_missing_or_unreadable_on_one_rank_has_the_same_effect_on_all(tmp_path):
    run_folder.write_record(tmp_path, RunRecord(run=RUN, has_checkpoint=True))
    for iteration in (2, 4):
        writer = CheckpointWriter(tmp_path, ALONE, keep=0, is_asynchronous=False, run=RUN)
        state = STATE | {"iteration": iteration}
        writer.save(iteration, {"policy": torch.arange(3.0)}, state)
    first, second = launch("tests.checkpoints.test_checkpoint:find_with_a_fault", 2, str(tmp_path))
    assert first == second
    assert "Input/output error" in first[0] and "000004/" in first[0] and first[1] == "000002"
    assert names(tmp_path) == ["000002", "000004.corrupted"]


@pytest.mark.parametrize(
    "remove",
    [lambda run: format.remove_checkpoints_after(run, 2, RUN), lambda run: save(run, 1, keep=1)],
)
def test_a_checkpoint_partially_removed_by_a_crash_is_ignored(tmp_path, monkeypatch, remove):
    for iteration in (2, 4):
        save(tmp_path, iteration)
    whole = len(format.complete(tmp_path))

    def crash(folder, **_):
        if folder.exists():  # except partial folders of an earlier crash
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path)
    remaining = format.complete(tmp_path)
    assert len(remaining) < whole or remaining[0].name == "000001"
    assert all((folder / "tensors" / ".metadata").is_file() for folder in remaining)
