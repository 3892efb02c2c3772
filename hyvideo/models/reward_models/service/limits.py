"""Limits of the reward service."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a request and on connections."""

    body: int = 2**30  # bytes
    prompts: int = 2**26  # bytes of a /check_prompts body
    seconds: float = 20.0  # for the headers to arrive, and for a body in addition to its length / ``rate``
    rate: float = 2.0**20  # minimum bytes per second of a body
    connections: int = 512
    videos: int = 64
    frames: int = 1024  # of a video
    pixels: int = 2**22  # of a frame
