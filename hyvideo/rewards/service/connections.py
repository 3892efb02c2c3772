"""Connections of the reward service, with limits on their number and on the time until a request's
headers arrive.
"""

import asyncio
import socket
from functools import partial

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from hyvideo.rewards.service.limits import Limits


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a listening socket, on a free port if it is 0, and its URL.

    Raises OSError for an unavailable address.
    """
    name, family = (f"[{host}]", socket.AF_INET6) if ":" in host else (host, socket.AF_INET)
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    # otherwise each answer waits 40 ms for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def make_server(app: FastAPI, limits: Limits | None = None) -> uvicorn.Server:
    protocol = partial(GuardedProtocol, limits or Limits(), {})
    return uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", log_level="warning"))


class GuardedProtocol(H11Protocol):
    """A connection.

    If there are too many connections, the one that has been idle for longest is dropped.

    ``idle`` maps connections that wait for their client, oldest first, to the timers that drop
    them. A connection waits for its client if it has no active request, is being closed, or has
    more of an answer than the client has read.
    """

    def __init__(
        self, limits: Limits, idle: "dict[GuardedProtocol, asyncio.TimerHandle]", **options
    ):
        super().__init__(**options)
        self.limits = limits
        self.idle = idle
        self.is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.limits.connections:
            next(iter(self.idle)).drop()  # this connection if no other is idle

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        # requests sent ahead keep a connection busy that reads no answer
        is_pipelining = self.conn.trailing_data[0]
        if self.conn.their_state is h11.SEND_BODY or is_pipelining:
            self.transport.close()
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        super().connection_lost(exc)
        self._watch()

    def drop(self) -> None:
        self.is_over = True
        self.transport.abort()
        self._watch()

    def _watch(self) -> None:
        """Start the timer if the connection waits for its client, cancel it otherwise."""
        is_busy = self.cycle and not self.cycle.response_complete and not self.flow.write_paused
        if self.is_over or (is_busy and not self.transport.is_closing()):
            if timer := self.idle.pop(self, None):
                timer.cancel()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(self.limits.seconds, self.drop)
