"""Prompts and reference images to conditions; every distinct part is encoded once.

The kinds of parts are the family's (`Part`): text always, quoted text and images where a request has them. The encoders
are read from disk when the first part needs them. With a `PartStore` the parts outlive the run: a second run over the
same prompts reads no encoder at all.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyvideo.data.outside import replacing
from hyvideo.data.prompts import Request
from hyvideo.models.conditions import Condition, Conditions
from hyvideo.models.family import Part

_MAX_IN_MEMORY = 256  # parts held in memory when they are also on disk

Encoded = dict[str, Tensor]  # a part, as it is stored


class PartStore:
    """Encoded parts on disk, one file each, named by a hash of their content and of their encoder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def get(self, key: str) -> Encoded | None:
        """The part, or None where it is not stored or its file is damaged (it is then made again)."""
        try:
            return load_file(self.folder / f"{key}.safetensors")
        except (FileNotFoundError, SafetensorError):
            return None

    def put(self, key: str, part: Encoded) -> None:
        """Stores a part, complete or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / f"{key}.safetensors") as path:
            save_file({name: tensor.contiguous() for name, tensor in part.items()}, path)


class ConditionEncoder:
    """Conditions of requests, on the CPU, in ``dtype``; ``identity`` tells these encoders from others in a store.

    ``load`` gives the encoder of one of the ``parts``.
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
        self.parts, self._load = parts, load
        self._loaded: dict[str, Callable[..., list[Encoded]]] = {}
        self._parts: dict[str, Encoded] = {}  # the last that was asked for comes last
        self.dtype, self.identity, self.store = dtype, identity, store

    def __call__(self, requests: list[Request], *, height: int = 0, width: int = 0) -> Conditions:
        """Conditions of requests, one object for equal ones; images are fitted to videos of this size in pixels."""
        found: dict[Request, dict[str, Encoded]] = {request: {} for request in requests}
        for part in self.parts:
            contents = {request: content for request in found if (content := part.content(request)) is not None}
            encoded = self._encode(part, list(dict.fromkeys(contents.values())), height, width)
            for request, content in contents.items():
                found[request][part.kind] = encoded[content]
        conditions = {request: Condition.of_parts(parts) for request, parts in found.items()}
        return Conditions(tuple(conditions[request] for request in requests))

    def release(self) -> None:
        """Lets go of the encoders. A part that is needed later and not known yet reads them again."""
        self._loaded.clear()

    def _encode(self, part: Part, contents: list[str], height: int, width: int) -> dict[str, Encoded]:
        """Parts by content; all that are not known yet go through the encoder together."""
        keys = {
            content: self._key(part.kind, f"{height} x {width} {_content_of(content)}" if part.is_file else content)
            for content in contents
        }
        known = {content: self._find(key) for content, key in keys.items()}
        if missing := [content for content, encoded in known.items() if encoded is None]:
            if part.kind not in self._loaded:
                self._loaded[part.kind] = self._load(part)
            for content, encoded in zip(missing, self._loaded[part.kind](missing, height, width)):
                known[content] = self._keep(keys[content], encoded)
        return known

    def _key(self, kind: str, content: str) -> str:
        described = f"{kind}\0{self.identity}\0{self.dtype}\0{content}".encode(errors="surrogatepass")
        return f"{kind}-{hashlib.blake2b(described, digest_size=16).hexdigest()}"

    def _find(self, key: str) -> Encoded | None:
        part = self._parts.pop(key, None) or (self.store and self.store.get(key))
        return self._remember(key, part) if part else None

    def _keep(self, key: str, part: Encoded) -> Encoded:
        # The latents of an image stand beside latents that stay float32.
        part = {name: tensor if name == "latents" else tensor.to(self.dtype) for name, tensor in part.items()}
        if self.store:
            self.store.put(key, part)
        return self._remember(key, part)

    def _remember(self, key: str, part: Encoded) -> Encoded:
        self._parts[key] = part
        if self.store and len(self._parts) > _MAX_IN_MEMORY:
            del self._parts[next(iter(self._parts))]
        return part


@functools.lru_cache(maxsize=4096)
def _content_of(path: str) -> str:
    """Hash of a file, so that an image that was replaced is encoded again."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ValueError(f"a reference image must be a readable file, got {path!r} ({error.strerror})") from error
