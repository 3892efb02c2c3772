"""Rules that depend on the machine."""

import sys

import pytest

from hyvideo.settings.machine_rules import is_installed
from hyvideo.settings.rules import check


@pytest.mark.parametrize("report", ["wandb", "tensorboard", "trackio"])
def test_a_missing_tracker_package_raises(tiny_config, monkeypatch, report):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"report_to needs {report}, which is not installed"):
        check(tiny_config.with_settings(report_to=[report]))
    check(tiny_config)


def test_a_folder_with_the_name_is_not_a_package(tmp_path, monkeypatch):
    (tmp_path / "some_reports").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("some_reports") and not is_installed("no_such_package")
    assert is_installed("yaml")


def test_a_missing_checkpoint_raises(tiny_config, tmp_path):
    for wanted, problem in (
        (tmp_path / "nowhere", "it does not exist"),
        (tmp_path, "state.json: it does not exist"),
    ):
        with pytest.raises(ValueError, match=f"a checkpoint folder, got '{wanted}': {problem}"):
            check(tiny_config.with_settings(resume_from_checkpoint=str(wanted)))


@pytest.mark.parametrize("linked", [False, True])
def test_weights_that_the_run_would_remove_are_rejected(tiny_config, tmp_path, linked):
    """A checkpoint of the run is deleted by save_total_limit, and a restart could not read it."""
    checkpoint = tmp_path / "run/checkpoints/000002"
    checkpoint.mkdir(parents=True)
    given = tmp_path / "given" if linked else checkpoint
    if linked:
        given.symlink_to(checkpoint)
    rule = "anchor_path must not be in the checkpoints of output_dir"
    config = tiny_config.with_settings(
        output_dir=str(tmp_path / "run"), kl_strategy="fixed", anchor_path=str(given)
    )
    with pytest.raises(ValueError, match=rule):
        check(config)
    check(config.with_settings(output_dir=str(tmp_path / "other")))
