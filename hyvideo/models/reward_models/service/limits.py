"""Limits of a service: what its requests may have and take."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a request, and of the connections that have none."""

    body: int = 2**30  # bytes
    prompts: int = 2**26  # bytes of a body that has prompts alone
    seconds: float = 20.0  # for the headers to arrive, and for a body beside what its bytes take at ``rate``
    rate: float = 2.0**20  # bytes a second; a body that comes more slowly trickles
    connections: int = 512
    videos: int = 64
    frames: int = 1024  # of a video
    pixels: int = 2**22  # of a frame
