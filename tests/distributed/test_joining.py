"""Ranks that wait for the others: an address that is none, and a signal."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from hyvideo.distributed import mesh


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1", "http://node1:29500", "127.0.0.1:29500", "two words"]
)
def test_an_address_of_rank_0_that_is_none_is_refused(monkeypatch, address):
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        mesh.check_master_address()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", ""])
def test_an_address_of_rank_0_is_accepted(monkeypatch, address):
    monkeypatch.setenv("MASTER_ADDR", address)
    mesh.check_master_address()


JOIN = """
import torch
from hyvideo.distributed import mesh
from hyvideo.settings import processes
processes.exit_on_signals()
print("joins", flush=True)
mesh.join(torch.device("cpu"), timeout=600)
"""


def test_a_signal_ends_a_rank_that_waits_for_another_one():
    """A node of the job that never starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN],
        env=environment | {"MASTER_PORT": str(port)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "joins\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) in (-signal.SIGTERM, 75)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
