"""Checkpoints are complete or absent."""

import pytest
import torch
from torch import nn

from hyvideo.distributed import checkpoint
from hyvideo.distributed.checkpoint import TrainingState


class Model(nn.Linear):
    def save_pretrained(self, folder):
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")


def save(folder, iteration, keep=0, anchor=None):
    training = TrainingState({"iteration": iteration}, {"step": iteration}, anchor)
    return checkpoint.save(folder, iteration, Model(2, 2), training, keep=keep)


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    anchor = {"weight": torch.arange(3.0)}
    folder = save(tmp_path, 7, anchor=anchor)
    training = checkpoint.load(folder, torch.device("cpu"))
    assert training.state == {"iteration": 7} and training.optimizer == {"step": 7}
    assert torch.equal(training.anchor["weight"], anchor["weight"])
    assert checkpoint.load(save(tmp_path, 8), torch.device("cpu")).anchor is None


def test_only_the_newest_are_kept_and_latest_names_the_last(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration, keep=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["000004", "000006"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "000006"
    assert checkpoint.find(tmp_path, "latest").name == "000006"


def test_latest_is_the_one_last_written_even_if_its_number_is_smaller(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    save(tmp_path, 3, keep=1)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["000003"]
    assert checkpoint.find(tmp_path, "latest").name == "000003"


def test_a_pointer_to_nothing_gives_way_to_the_newest(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text("000009\n")
    assert checkpoint.find(tmp_path, "latest").name == "000002"


def test_what_came_after_a_resumed_iteration_is_removed(tmp_path):
    for iteration in (2, 4):
        save(tmp_path, iteration)
        (tmp_path / "rollouts" / f"{iteration:06d}").mkdir(parents=True)
    checkpoint.drop_after(tmp_path, 2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["000002"]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["000002"]


def test_what_a_crash_left_unfinished_is_not_seen(tmp_path, monkeypatch):
    save(tmp_path, 2)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4)
    assert checkpoint.find(tmp_path, "latest").name == "000002"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    assert checkpoint.find(tmp_path, "latest") is None
    with pytest.raises(ValueError, match="must be `latest` or a checkpoint folder"):
        checkpoint.find(tmp_path, str(tmp_path))
    folder = save(tmp_path, 2)
    (folder / "optimizer.pt").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load(folder, torch.device("cpu"))


@pytest.mark.parametrize("remove", [lambda run: checkpoint.drop_after(run, 2), lambda run: save(run, 1, keep=1)])
def test_what_a_crash_left_half_removed_is_not_seen(tmp_path, monkeypatch, remove):
    for iteration in (2, 4):
        save(tmp_path, iteration)
    whole = len(checkpoint.complete(tmp_path))

    def crash(folder, **_):
        if folder.exists():  # not the leftovers of an earlier crash
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path)
    left = checkpoint.complete(tmp_path)
    assert len(left) < whole or left[0].name == "000001"
    assert all((folder / "optimizer.pt").is_file() for folder in left)
