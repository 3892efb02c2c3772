"""Address and network interface of this node by which the other nodes of a run reach it.

Where /etc/hosts maps the host name to a loopback address, as Ubuntu does, torchrun and gloo would
announce an address that no other node can reach.
"""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

_ANY_OTHER_HOST = "198.51.100.1"  # of documentation; nothing is sent to it
_DISCARD_PORT = 9
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


@dataclass(frozen=True)
class NodeAddress:
    """The address by which the other nodes of a run reach this one."""

    address: str
    is_master: bool
    interface: str  # of the address; empty if unknown, or if all processes are on this machine


def node_address(master: str) -> NodeAddress | None:
    """Return the address of this node on the network of ``master``; None if the name cannot be
    resolved yet.

    On the master itself this is the master's address or, if its name is mapped to a loopback
    address, the address of the default route. A master called localhost has all processes on this
    machine.
    """
    try:
        found = socket.getaddrinfo(master, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return None
    # A name may have a loopback address among others. IPv4 comes first, because gloo's interface is
    # found by it.
    targets = sorted(
        {info[4][0] for info in found},
        key=lambda target: (_is_loopback(target), ":" in target, target),
    )
    reached = [(target, source) for target in targets if (source := _source_address(target))]
    if not reached:
        return None
    target, address = reached[0]
    if not _is_loopback(target):
        return NodeAddress(address, address == target, _interface_of(address))
    if _is_loopback(master) or master == "localhost":
        return NodeAddress(target, True, "")
    address = _source_address(_ANY_OTHER_HOST) or target
    return NodeAddress(address, True, "" if _is_loopback(address) else _interface_of(address))


def _source_address(target: str) -> str | None:
    """Return the address from which this node would reach ``target``; None without a route.

    Sends nothing.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, _DISCARD_PORT))
            return probe.getsockname()[0]
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback address; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
