"""The address by which other nodes reach this one, and the worker's MASTER_ADDR on a node like
Ubuntu's.
"""

import socket
import subprocess
import sys

import pytest

from hyvideo.distributed import agent, node_address
from tests.forked import ROOT, python

HERE = node_address._source_address("198.51.100.1")  # of this machine's default route
needs_network = pytest.mark.skipif(HERE is None, reason="this machine has no default route")


def names(monkeypatch, **addresses):
    """Let these host names have these addresses, separated by spaces."""

    def getaddrinfo(host, port, *arguments, **options):
        if host not in addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_DGRAM, 17, "", (each, port))
            for each in addresses[host].split()
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def routes(monkeypatch, **sources):
    """Let this machine reach an address from another one, both written with underscores."""
    known = {target.strip("_").replace("_", "."): source for target, source in sources.items()}
    monkeypatch.setattr(node_address, "_source_address", known.get)


def test_a_node_has_the_address_from_which_it_reaches_the_master(monkeypatch):
    names(monkeypatch, node1="10.1.0.1")
    routes(monkeypatch, _10_1_0_1="10.1.0.2", _198_51_100_1="192.168.0.2")
    found = node_address.node_address("node1")
    assert (found.address, found.is_master) == ("10.1.0.2", False)


def test_the_master_has_the_address_that_the_user_gave(monkeypatch):
    names(monkeypatch, **{"10.1.0.1": "10.1.0.1"})
    routes(monkeypatch, _10_1_0_1="10.1.0.1", _198_51_100_1="192.168.0.1")
    found = node_address.node_address("10.1.0.1")
    assert (found.address, found.is_master) == ("10.1.0.1", True)


def test_a_master_whose_name_is_mapped_to_loopback_has_the_address_of_the_default_route(
    monkeypatch,
):
    names(monkeypatch, node1="127.0.1.1")
    routes(monkeypatch, _127_0_1_1="127.0.0.1", _198_51_100_1="10.1.0.1")
    found = node_address.node_address("node1")
    assert (found.address, found.is_master) == ("10.1.0.1", True)


def test_a_loopback_address_of_the_master_comes_after_its_other_addresses(monkeypatch):
    names(monkeypatch, node1="127.0.1.1 192.168.7.1 fd00::1")
    routes(
        monkeypatch, _127_0_1_1="127.0.0.1", _192_168_7_1="192.168.7.1", _198_51_100_1="10.1.0.1"
    )
    found = node_address.node_address("node1")
    assert (found.address, found.is_master) == ("192.168.7.1", True)


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1"])
def test_all_processes_of_a_local_master_stay_on_this_machine(master):
    assert node_address.node_address(master) == node_address.NodeAddress("127.0.0.1", True, "")


def test_an_unknown_name_is_left_to_torchrun(monkeypatch):
    names(monkeypatch)
    assert node_address.node_address("node1") is None
    arguments = [
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=node1:29500",
        "post_train.py",
        "--eta",
        "1",
    ]
    assert agent.reachable(arguments) == arguments


@needs_network
def test_the_interface_is_that_of_the_address():
    interface = node_address._interface_of(HERE)
    assert interface in {name for _, name in socket.if_nameindex()} and interface != "lo"
    assert (
        node_address._interface_of("127.0.0.1") == "lo"
        and node_address._interface_of("198.51.100.1") == ""
    )


@pytest.mark.parametrize("given", [None, "eth7"])
def test_the_address_comes_before_the_program_and_given_values_are_kept(monkeypatch, given):
    known = node_address.NodeAddress("10.1.0.2", False, "ib0")
    monkeypatch.setattr(agent, "node_address", {"node1": known}.get)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500"]
    program = ["post_train.py", "--local_addr", "of the program"]
    assert agent.reachable([*meeting, *program]) == [*meeting, "--local-addr=10.1.0.2", *program]
    assert agent.os.environ["GLOO_SOCKET_IFNAME"] == (given or "ib0")
    mine = [*meeting, "--local-addr=10.9.0.2", *program]
    assert agent.reachable(mine) == mine
    single = ["--standalone", "--nproc_per_node=8", *program]
    assert agent.reachable(single) == single


# /etc/hosts of Ubuntu: the name of this machine is mapped to a loopback address.
UBUNTU = """
import runpy, socket, sys
original = socket.getaddrinfo
def getaddrinfo(host, *arguments, **options):
    return original("127.0.1.1" if host == "node1" else host, *arguments, **options)
socket.getaddrinfo = getaddrinfo
socket.getfqdn = lambda name="": "localhost"
runpy.run_module("scripts.launch", run_name="__main__", alter_sys=True)
"""
WORKER = """
import os
print("MASTER_ADDR", os.environ["MASTER_ADDR"], "on", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""


@needs_network
@pytest.mark.parametrize("master", ["node1", HERE])
def test_the_workers_of_a_node_like_ubuntus_get_an_address_that_other_nodes_reach(
    tmp_path, master, monkeypatch
):
    """Without the address, torchrun sends the second node to its own localhost; an address as
    master never starts.
    """
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket() as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
    options = [
        "--nnodes=1:1",
        "--nproc_per_node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master}:{port}",
    ]
    command = [
        python(),
        "-c",
        UBUNTU,
        *options,
        str(tmp_path / "worker.py"),
        "--output_dir",
        str(tmp_path),
    ]
    environment = agent.os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHON_EXEC": sys.executable,
    }
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert f"MASTER_ADDR {HERE} on {node_address._interface_of(HERE)}" in done.stdout, done.stderr
