"""Encoding of prompts and reference images to conditions, whose distinct parts are encoded once.

An encoder is loaded when it is first needed. Encoded parts stay on disk with a `PartStore`, else in
memory, of which they use at most 1 GiB: about 700 prompts of 200 tokens with 3584 channels.
"""

import gc
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyvideo.data.prompts import Request
from hyvideo.files.digests import digest_file, digest_of
from hyvideo.files.files import publish
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import Part

Encoded = dict[str, Tensor]  # one part in its stored form
Content = str | tuple[str, ...]  # a text, or paths of images
_RETRY_S = 0.2
MAX_CACHE_BYTES = 2**30  # of the parts in memory, in each process


class PartCache:
    """Encoded parts in memory.

    Above ``max_bytes``, those that have not been used for longest are dropped.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._parts: OrderedDict[str, Encoded] = OrderedDict()  # least recently used first

    def get(self, key: str) -> Encoded | None:
        if key in self._parts:
            self._parts.move_to_end(key)
        return self._parts.get(key)

    def __setitem__(self, key: str, part: Encoded) -> None:
        self.num_bytes += _num_bytes(part) - _num_bytes(self._parts.pop(key, {}))
        self._parts[key] = part
        while self.num_bytes > self.max_bytes:
            _, dropped = self._parts.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


class PartStore:
    """Encoded parts on disk, one file each, named by a hash of content and encoder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.patience_s = 0.0  # how long `get` waits for a file

    def get(self, key: str) -> Encoded | None:
        """Return the part, or None if it is not stored or its file is corrupted (it is then encoded
        again).

        With ``patience_s``, a part that is not there yet is looked up again for so long.
        """
        end = time.monotonic() + self.patience_s
        while True:
            with suppress(FileNotFoundError, SafetensorError):
                return load_file(self.folder / f"{key}.safetensors")
            if time.monotonic() >= end:
                return None
            time.sleep(_RETRY_S)
            if self.folder.is_dir():
                os.listdir(self.folder)  # lets NFS forget that the file was missing

    def __setitem__(self, key: str, part: Encoded) -> None:
        """Store a part atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with publish(self.folder / f"{key}.safetensors") as path:
            save_file({name: tensor.contiguous() for name, tensor in part.items()}, path)


class ConditionEncoder:
    """Encoder of requests to conditions on the CPU, in ``dtype``.

    ``load`` returns the encoder of one of the ``parts``; ``identity`` distinguishes encoders in a
    shared store.
    """

    def __init__(
        self,
        parts: tuple[Part, ...],
        load: Callable[[Part], Callable[..., list[Encoded]]],
        *,
        dtype: torch.dtype,
        identity: str = "",
        store: PartStore | None = None,
    ):
        self.parts = parts
        self._load = load
        self._loaded: dict[str, Callable[..., list[Encoded]]] = {}
        self.dtype = dtype
        self.identity = identity
        self.store: PartStore | PartCache = PartCache() if store is None else store
        self._file_hashes: dict[str, str] = {}  # by path, when a file was first used

    def __call__(
        self, requests: list[Request], size: tuple[int, int, int] = (0, 0, 0)
    ) -> Conditions:
        """Return one condition per request, one object for equal requests.

        ``size`` has the frames, height and width of the videos, to which images are fitted.
        """
        found: dict[Request, dict[str, Encoded]] = {request: {} for request in requests}
        for part in self.parts:
            contents = {request: part.content(request) for request in found}
            contents = {
                request: content for request, content in contents.items() if content is not None
            }
            encoded = self._encode(part, list(dict.fromkeys(contents.values())), size)
            for request, content in contents.items():
                found[request][part.kind] = encoded[content]
        conditions = {request: Condition.from_parts(parts) for request, parts in found.items()}
        return Conditions(tuple(conditions[request] for request in requests))

    def release(self) -> None:
        """Free the encoders. They are loaded again if a new part must be encoded."""
        self._loaded.clear()
        gc.collect()

    def expect_stored(self, patience_s: float = 10.0) -> None:
        """Wait so long for a part that is not on disk: another node has stored it, and NFS may show
        it late.
        """
        if isinstance(self.store, PartStore):
            self.store.patience_s = patience_s

    def _encode(
        self, part: Part, contents: list[Content], size: tuple[int, int, int]
    ) -> dict[Content, Encoded]:
        """Return the encoded parts by content; those that are not stored are encoded in
        one batch.
        """
        keys = {}
        for content in contents:
            identity = content
            if part.is_file:
                paths = (content,) if isinstance(content, str) else content
                identity = f"{size} {' '.join(map(self._file_hash, paths))}"
            keys[content] = self._key(part.kind, identity)
        known = {content: self.store.get(key) for content, key in keys.items()}
        missing = [content for content, encoded in known.items() if encoded is None]
        if missing:
            if part.kind not in self._loaded:
                self._loaded[part.kind] = self._load(part)
            all_encoded = self._loaded[part.kind](missing, size)
            for content, encoded in zip(missing, all_encoded):
                stored = {name: states.to(self.dtype) for name, states in encoded.items()}
                # Image latents are combined with the sampled latents, which stay float32.
                if "latents" in encoded:
                    stored["latents"] = encoded["latents"]
                known[content] = self.store[keys[content]] = stored
        return known

    def _file_hash(self, path: str) -> str:
        """Return the hash of a file when it was first used, so that a replaced image is encoded
        again.
        """
        if path not in self._file_hashes:
            self._file_hashes[path] = digest_file(path)
        return self._file_hashes[path]

    def _key(self, kind: str, content: str) -> str:
        return f"{kind}-{digest_of(kind, self.identity, str(self.dtype), content)}"


def _num_bytes(part: Encoded) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in part.values())
