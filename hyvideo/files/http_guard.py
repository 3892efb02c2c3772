"""The guard of the web servers: who may send a request, how large it may be, and how long it may
take to arrive.
"""

import asyncio
import hmac
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from starlette.requests import ClientDisconnect

LOCAL = ("127.0.0.1", "localhost", "::1")  # addresses and names of this machine
MAX_CONNECTIONS = 512


def access(token: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Return a dependency that rejects requests without the bearer token.

    Without a token, it rejects requests that do not name this machine, such as those of a web page
    whose own name has been pointed at it.
    """

    async def check(request: Request) -> None:
        if token:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise HTTPException(401, "the bearer token is missing or wrong")
        elif _host(request) not in LOCAL:
            raise HTTPException(403, "without a token, only this machine is served, by its name")

    return check


async def read_body(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raises HTTPException without a length, for a body that is too large, before it is read, and for
    one that does not arrive in time.
    """
    length = request.headers.get("content-length", "")
    if not length.isdigit() or int(length) > max_bytes:
        raise HTTPException(413, f"a request needs a content-length of at most {max_bytes} bytes")
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except (TimeoutError, ClientDisconnect) as error:
        raise HTTPException(
            408, f"the request did not arrive completely within {seconds:g} seconds"
        ) from error


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a listening socket, on a free port if it is 0, and its URL.

    Raises OSError for an unavailable address.
    """
    name = host
    family = socket.AF_INET
    if ":" in host:
        name = f"[{host}]"
        family = socket.AF_INET6
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    # otherwise each answer waits 40 ms for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return the server of an app; ``run(sockets=[listener])`` starts it."""
    config = uvicorn.Config(app, ws="none", log_level="warning", limit_concurrency=MAX_CONNECTIONS)
    return uvicorn.Server(config)


def _host(request: Request) -> str | None:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:  # such as an open bracket
        return None
