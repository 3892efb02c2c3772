"""Tests of the watchdog: a rank that hangs says in which stage, a healthy one prints nothing."""

import socket
import time
from itertools import groupby

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.watchdog import Watchdog
from hyvideo.settings.rules import check
from hyvideo.trainer import Trainer

HOST = socket.gethostname()
CPU = torch.device("cpu")
LIMIT = 0.3


def test_a_stage_that_takes_too_long_is_printed_once_with_the_stack(capfd):
    with Watchdog(Mesh(rank=1, world_size=2, sp_size=1), LIMIT) as watchdog:
        watchdog.enter("rollout", 6)
        watchdog.enter("decode", 7)
        time.sleep(4 * LIMIT)
    stderr = capfd.readouterr().err
    late = f"watchdog: rank 1 ({HOST}) has been in stage decode of iteration 7 for 0.3 s"
    assert stderr.count("watchdog:") == stderr.count(late) == 1
    assert "in test_a_stage_that_takes_too_long_is_printed_once_with_the_stack" in stderr


def test_stages_below_the_limit_print_nothing(mesh, capfd):
    with Watchdog(mesh, 2 * LIMIT) as watchdog:
        for iteration in range(4):
            watchdog.enter("rollout", iteration)
            time.sleep(LIMIT)
    time.sleep(3 * LIMIT)  # after the end
    assert capfd.readouterr().err == ""


def test_a_limit_of_0_disables_the_report(mesh, capfd):
    with Watchdog(mesh, 0) as watchdog:
        watchdog.enter("rollout", 1)
        time.sleep(LIMIT)
    assert capfd.readouterr().err == ""


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
    passes = plan.num_trained_steps * plan.rollouts // config.objective.mini_batch_size_per_update
    assert stages.count(("update", 1)) == 1 + passes  # a long stage is reported in parts
    assert stages.count(("rollout", 1)) == 1 + config.rollout.grpo_sampling_steps
    assert stages.count(("validation", 0)) == 2 + 1 + config.record.validation_steps  # in one batch
    assert entered[1:5] == ["validation", "validation reward", "conditions", "rollout"]
    assert entered[5:11] == ["decode", "anchor", "reward", "record", "update", "save"]
    assert entered[11:] == ["validation", "validation reward", "end"]
    assert stages[stages.index(("reward", 1)) + 1] == ("after reward", 1)


def test_watchdog_seconds_must_not_be_negative(tiny_config):
    check(tiny_config.with_settings(watchdog_seconds=0.0))
    with pytest.raises(ValueError, match="watchdog_seconds"):
        check(tiny_config.with_settings(watchdog_seconds=-1.0))
