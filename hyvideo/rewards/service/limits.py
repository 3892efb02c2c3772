"""Limits of the reward service."""

from dataclasses import dataclass

MAX_WAITING = 128  # active requests, each of which may wait for memory or for its scores


@dataclass(frozen=True)
class Limits:
    """Limits on requests and connections."""

    body: int = 2**31  # bytes of a /score body
    # bytes of the /score bodies in memory; a further request waits before its body is read
    memory: int = 2**33
    prompts: int = 2**26  # bytes of a /check_prompts body
    # for the headers to arrive, and for a body in addition to its length / ``rate``
    seconds: float = 20.0
    rate: float = 2.0**20  # minimum bytes per second of a body
    connections: int = 512
    videos: int = 64  # per request
    frames: int = 1024  # per video
    pixels: int = 2**22  # per frame
