"""Videos embedded in a page: small files as they are, large ones as previews with a link to the
file, all with a poster frame.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from hyvideo.data.previews import encode_poster, encode_preview

MAX_CLIP_BYTES = 5_500_000  # of all videos of a page; base64 adds a third
MIN_SHARE = 100_000  # bytes of a video; if there are too many videos, some are left out instead
MAX_PREVIEW_BYTES = 400_000
MAX_POSTER_BYTES = 12_000  # in addition to the video
# previews and posters; a run writes its report at every validation, with mostly the same videos
NUM_CACHED = 256

Row = Sequence[Path]  # files that are shown together


@dataclass(frozen=True)
class Clips:
    """Videos of a page. A digest belongs to a file."""

    contents: dict[str, str] = field(default_factory=dict)  # base64 of an mp4 file, by digest
    posters: dict[str, str] = field(default_factory=dict)  # base64 of a WebP picture, by digest
    digests: dict[Path, str] = field(default_factory=dict)  # of the videos of the page
    # size of the file as text, by digest of a preview
    originals: dict[str, str] = field(default_factory=dict)


def alternate(*sources: Iterable[Row]) -> Iterator[Row]:
    """Yield the first row of each source, then the second of each, and so on."""
    for rows in zip_longest(*sources):
        yield from (row for row in rows if row is not None)


def embed(rows: Iterable[Row], room: int = MAX_CLIP_BYTES) -> Clips:
    """Embed the files of as many rows as fit into ``room`` bytes, in order; skip files that cannot
    be read.

    Small files are embedded as they are. Of the remaining room, every other file has an equal share
    for its preview.
    """
    chosen: dict[Path, int] = {}  # size by file
    needed = 0
    for row in rows:
        sizes = {file: file.stat().st_size for file in row if file not in chosen}
        least = sum(min(size, MIN_SHARE) + MAX_POSTER_BYTES for size in sizes.values())
        if needed + least <= room:
            needed += least
            chosen |= sizes
    share = fair_share(chosen.values(), room - MAX_POSTER_BYTES * len(chosen))
    clips = Clips()
    for file, size in chosen.items():
        _embed_file(clips, file, size, share)
    return clips


def fair_share(sizes: Iterable[int], room: int) -> int:
    """Return the largest share of ``room`` for which ``sum(min(size, share)) <= room``."""
    ascending = sorted(sizes)
    for number, size in enumerate(ascending):
        share = room // (len(ascending) - number)
        if size > share:
            return share
        room -= size
    return max(ascending, default=0)


def _embed_file(clips: Clips, file: Path, size: int, share: int) -> None:
    digest = _digest(file, file.stat().st_mtime_ns, size)
    if digest not in clips.contents:
        try:
            picture = _poster(file, digest)
            if size <= share:
                content = file.read_bytes()
            else:
                content = _preview(file, digest, min(share, MAX_PREVIEW_BYTES))
        except ValueError:  # not a video
            return
        if len(content) > share:
            return
        if size > share:
            clips.originals[digest] = f"{size / 1e6:.3g} MB"
        clips.contents[digest] = base64.b64encode(content).decode()
        if picture:
            clips.posters[digest] = base64.b64encode(picture).decode()
    clips.digests[file] = digest


@lru_cache(maxsize=4096)
def _digest(file: Path, modified: int, size: int) -> str:
    """Return the digest of a file of this time and size."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


@lru_cache(maxsize=NUM_CACHED)
def _preview(file: Path, digest: str, max_bytes: int) -> bytes:
    """Return a preview of a file whose content has a digest."""
    return encode_preview(file, max_bytes=max_bytes)


@lru_cache(maxsize=NUM_CACHED)
def _poster(file: Path, digest: str) -> bytes:
    return encode_poster(file, max_bytes=MAX_POSTER_BYTES)
