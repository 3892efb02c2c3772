"""Tests of the watchdog: a rank that hangs says in which stage, a healthy one prints nothing."""

import socket
import time

import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.watchdog import Watchdog

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
