"""The inputs of a run are read once, and all parts of the run see the same ones."""

import pytest

from hyvideo.checks.rules import check
from hyvideo.data import prompts
from hyvideo.planning.plan import plan_lines
from hyvideo.settings.iteration_plan import make_plan


@pytest.fixture
def files_read(monkeypatch):
    """Names of the CSV files in the order in which they are opened."""
    names = []
    read = prompts.read_table

    def count(path, *others):
        names.append(path.name)
        return read(path, *others)

    monkeypatch.setattr(prompts, "read_table", count)
    return names


def write(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.csv").write_text("\n".join(["prompt", *rows]) + "\n")
    return [str(folder / f"{name}.csv") for name in files]


def test_checks_and_plan_read_each_file_once(tiny_config, tmp_path, files_read):
    training, validation = write(tmp_path, training=["a", "b"], validation=["c"])
    config = tiny_config.with_settings(prompts_csv=training, valid_video_csv=[validation, training])
    inputs = check(config)
    assert sorted(files_read) == ["training.csv", "validation.csv"]
    assert plan_lines(inputs, "cpu")
    assert [request.prompt for request in inputs.requests] == ["a", "b"]
    assert [request.prompt for request in inputs.validated] == ["c", "a", "b"]
    assert inputs.plan is inputs.plan and inputs.plan == make_plan(config)
    assert len(files_read) == 2
