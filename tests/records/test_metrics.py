"""Metrics are written under their names to every tracker, each iteration once, also after
a crash.
"""

import importlib.machinery
import json
import sys
import types

import numpy as np
import pytest
import torch

from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.trackers import check_login


def writer(folder, report_to=(), resume_iteration=None, **settings) -> MetricsWriter:
    return MetricsWriter(
        folder,
        report_to=list(report_to),
        run_name="test",
        config=settings,
        resume_iteration=resume_iteration,
    )


def lines(folder) -> list[dict]:
    """Return the records of metrics.jsonl, read as strict JSON."""

    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0}
    )
    accumulator.Reload()
    return accumulator


def scalars(folder, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(name)]


def test_each_iteration_is_one_line(tmp_path):
    with writer(tmp_path) as metrics:
        metrics.log({"reward/mean": 0.25, "update": 2, "kl/position": 1e-12}, 1)
        metrics.log({"reward/mean": torch.tensor(0.5), "update": 4, "iteration": 2}, 2)
    first, second = lines(tmp_path)
    assert first == {"iteration": 1, "reward/mean": 0.25, "update": 2, "kl/position": 1e-12}
    assert next(iter(first)) == "iteration" and isinstance(first["update"], int)
    assert second == {"iteration": 2, "reward/mean": 0.5, "update": 4}


def test_non_finite_values_become_null(tmp_path):
    with writer(tmp_path) as metrics:
        metrics.log(
            {
                "a": float("nan"),
                "b": float("inf"),
                "c": -float("inf"),
                "d": np.float32("nan"),
                "e": 0.0,
            },
            1,
        )
    assert lines(tmp_path) == [
        {"iteration": 1, "a": None, "b": None, "c": None, "d": None, "e": 0.0}
    ]


def test_a_resumed_run_drops_later_and_incomplete_lines(tmp_path):
    with writer(tmp_path) as metrics:
        for iteration in range(1, 6):
            metrics.log({"reward/mean": float(iteration)}, iteration)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "reward/me')
    with writer(tmp_path, resume_iteration=3) as metrics:
        assert [line["iteration"] for line in lines(tmp_path)] == [1, 2, 3]
        metrics.log({"reward/mean": 40.0}, 4)
    assert [(line["iteration"], line["reward/mean"]) for line in lines(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_crash_while_dropping_lines_keeps_the_old_file(tmp_path, monkeypatch):
    whole = b'{"iteration": 1}\n{"iteration": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole)

    def crash(source, target):
        raise RuntimeError("power cut")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        writer(tmp_path, resume_iteration=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_can_start_over_or_resume_into_a_new_folder(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"iteration": 0}\n{"iteration": 1}\n')
    with writer(tmp_path, resume_iteration=-1) as metrics:
        metrics.log({}, 0)
    assert lines(tmp_path) == [{"iteration": 0}]
    assert not capsys.readouterr().err
    with writer(tmp_path / "new", resume_iteration=7) as metrics:
        metrics.log({}, 8)
    assert lines(tmp_path / "new") == [{"iteration": 8}] and not capsys.readouterr().err


def test_tensorboard_receives_scalars(tmp_path):
    with writer(tmp_path, ["tensorboard"], learning_rate=1e-5) as metrics:
        metrics.log({"reward/mean": 0.25, "lr": 1e-5, "iteration": 1}, 1)
        metrics.log({"reward/mean": 0.5, "lr": 1e-5}, 2)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert set(events(tmp_path).Tags()["scalars"]) == {"reward/mean", "lr"}
    config = events(tmp_path).Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"learning_rate": 1e-05' in config and '"run_name": "test"' in config


def test_tensorboard_hides_repeated_iterations(tmp_path):
    with writer(tmp_path, ["tensorboard"]) as metrics:
        for iteration in range(1, 6):
            metrics.log({"reward/mean": float(iteration)}, iteration)
    with writer(tmp_path, ["tensorboard"], resume_iteration=3) as metrics:
        metrics.log({"reward/mean": 40.0}, 4)
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


class FakeWandb(types.ModuleType):
    """Records the calls of wandb."""

    class Error(Exception):
        pass

    def __init__(self, *, mode="online"):
        super().__init__("wandb")
        self.mode = mode
        self.started, self.logged, self.finished, self.axes = [], [], 0, []
        self.Video = lambda file, format: ("video", file, format)

    def init(self, **settings):
        self.started.append(settings)
        return types.SimpleNamespace(
            id=settings["id"] or "run-1",
            log=self.logged.append,
            finish=self.finish,
            define_metric=lambda name, step_metric=None: self.axes.append((name, step_metric)),
        )

    def finish(self):
        self.finished += 1

    def setup(self):
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self):
        raise self.Error("No API key configured.")


def test_wandb_receives_metrics_by_iteration_and_video_files(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with writer(tmp_path, ["wandb"], eta=0.5) as metrics:
        metrics.log({"reward/mean": 0.25}, 1)
        metrics.add_video("samples/0", tmp_path / "clip.mp4", 1)
    assert wandb.started[0]["config"] == {"eta": 0.5} and wandb.started[0]["name"] == "test"
    assert wandb.started[0]["project"] == "sage-grpo" and wandb.started[0]["resume"] is None
    assert ("*", "iteration") in wandb.axes
    assert wandb.logged == [
        {"reward/mean": 0.25, "iteration": 1},
        {"samples/0": ("video", str(tmp_path / "clip.mp4"), "mp4"), "iteration": 1},
    ]
    assert wandb.finished == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer(tmp_path, ["wandb"]).close()
    writer(tmp_path, ["wandb"], resume_iteration=3).close()
    assert [(run["id"], run["resume"]) for run in wandb.started] == [
        (None, None),
        ("run-1", "allow"),
    ]


@pytest.mark.parametrize("mode, needs_key", [("online", True), ("offline", False)])
def test_a_missing_key_of_wandb_is_an_error(monkeypatch, mode, needs_key):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(mode=mode))
    check_login(["tensorboard"])
    if needs_key:
        with pytest.raises(ValueError, match="WANDB_MODE"):
            check_login(["wandb"])
    else:
        check_login(["wandb"])


def test_an_error_of_wandb_disables_it(tmp_path, monkeypatch, capsys):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def fail(values):
        raise wandb.Error("the service process has ended")

    with writer(tmp_path, ["wandb"]) as metrics:
        metrics.reports["wandb"].run.log = fail
        metrics.log({"reward/mean": 0.25}, 1)
        metrics.log({"reward/mean": 0.5}, 2)
    assert "the service process has ended" in capsys.readouterr().err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class FakeTrackio(types.ModuleType):
    """Records the calls that accelerate's tracker makes."""

    def __init__(self):
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
        self.started, self.logged, self.finished, self.config = [], [], 0, {}

    def init(self, **settings):
        self.started.append(settings)
        self.config = types.SimpleNamespace(update=self.store)
        return types.SimpleNamespace(log=self.log, finish=self.finish)

    def store(self, values, allow_val_change):
        self.stored = values

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_a_tracker_of_accelerate_receives_scalars_by_iteration(tmp_path, monkeypatch):
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with writer(tmp_path, ["trackio"], eta=0.5) as metrics:
        metrics.log({"reward/mean": 0.25, "quantiles/reward": [0.0, 1.0]}, 1)
    assert trackio.started == [{"project": "sage-grpo", "name": "test"}]
    assert trackio.stored == {"eta": 0.5}
    assert trackio.logged == [(1, {"reward/mean": 0.25})]
