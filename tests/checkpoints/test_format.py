"""Tests of which checkpoint or LoRA a path names, and of corrupted checkpoints."""

import pytest

from hyvideo.checkpoints import format
from hyvideo.settings.config import Config


def test_corrupted_checkpoints_are_kept_under_free_names(tmp_path):
    for content in ("first", "second"):
        folder = tmp_path / "000004"
        folder.mkdir()
        (folder / "state.json").write_text(content)
        format.keep_corrupted(folder)
    kept = [path.read_text() for path in tmp_path.glob("000004.corrupted*/state.json")]
    assert sorted(kept) == ["first", "second"] and not folder.exists()


def run_with_checkpoints(root):
    """A run of which iteration 3 was not written to its end."""
    for number in (1, 2, 3):
        for part in ("lora", "tensors"):
            (root / "checkpoints" / f"{number:06d}" / part).mkdir(parents=True)
    for number in (1, 2):
        (root / "checkpoints" / f"{number:06d}" / "digests.json").touch()
    return root


def test_the_folder_of_a_run_stands_for_its_newest_complete_checkpoint(tmp_path, capsys):
    run = run_with_checkpoints(tmp_path / "run")
    newest = run / "checkpoints" / "000002"
    assert format.saved_policy(run) == newest
    assert str(newest) in capsys.readouterr().err
    assert format.saved_lora(run) == format.saved_lora(newest) == newest / "lora"
    capsys.readouterr()
    assert format.saved_policy(newest) == newest
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="is neither"):
        format.saved_policy(newest / "lora")
    for read in (format.saved_policy, format.saved_lora):
        with pytest.raises(ValueError, match="missing.* does not exist"):
            read(tmp_path / "missing")


def test_a_run_without_a_complete_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=str(tmp_path)):
        format.saved_policy(tmp_path)


def test_settings_that_name_a_run_get_its_checkpoint(tmp_path):
    run = run_with_checkpoints(tmp_path / "run")
    given = {"pretrained_lora_path": str(run), "anchor_path": str(run)}
    config = Config.from_flat(given).resolved()
    newest = run / "checkpoints" / "000002"
    assert config.objective.anchor_path == str(newest)
    assert config.optimizer.pretrained_lora_path == str(newest / "lora")
