"""Connections of the reward service: bounded in number and in the seconds that a request's headers may take.

The body of a request that was refused is not read: its connection is closed behind the answer.
"""

import asyncio
from functools import partial

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from hyvideo.models.reward_models.service.limits import Limits


def make_server(app: FastAPI, limits: Limits | None = None) -> uvicorn.Server:
    """The HTTP server of a service made by `create_app`."""
    protocol = partial(GuardedProtocol, limits or Limits(), {})
    return uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", log_level="warning"))


class GuardedProtocol(H11Protocol):
    """One connection. Where there are too many, the one that has been without a request for longest is dropped.

    ``idle`` has the server's connections without a request, the oldest first, each with the timer that ends it.
    """

    def __init__(self, limits: Limits, idle: "dict[GuardedProtocol, asyncio.TimerHandle]", **options):
        super().__init__(**options)
        self.limits, self.idle = limits, idle

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.limits.connections:
            next(iter(self.idle)).drop()  # at worst this one

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def drop(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()
        self._watch()

    def _watch(self) -> None:
        """Lets the time for a request's headers run while there is no request."""
        if self.transport.is_closing() or (self.cycle and not self.cycle.response_complete):
            if timer := self.idle.pop(self, None):
                timer.cancel()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(self.limits.seconds, self.drop)
