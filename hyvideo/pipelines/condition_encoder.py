"""Prompts and reference images to conditions; every distinct part is encoded once.

    text     Qwen2.5-VL hidden states of the prompt        always
    glyph    ByT5 states of the text in double quotes      only where there is some
    image    SigLIP features and VAE latents of an image   only in image-to-video

The encoders are read from disk when the first part needs them. With a `PartStore` the parts outlive the run: a second
run over the same prompts reads no language model at all.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyvideo.data.outside import replacing
from hyvideo.data.prompts import Request
from hyvideo.models.conditions import GLYPH_WIDTH, Condition, Conditions, ImageCondition
from hyvideo.models.hunyuan_video15.prompt_encoders import GlyphEncoder, ImageEncoder, TextEncoder, glyph_text

_MAX_IN_MEMORY = 256  # parts held in memory when they are also on disk

Part = dict[str, Tensor]


class PartStore:
    """Encoded parts on disk, one file each, named by a hash of their content and of their encoder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def get(self, key: str) -> Part | None:
        """The part, or None where it is not stored or its file is damaged (it is then made again)."""
        try:
            return load_file(self.folder / f"{key}.safetensors")
        except (FileNotFoundError, SafetensorError):
            return None

    def put(self, key: str, part: Part) -> None:
        """Stores a part, complete or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / f"{key}.safetensors") as path:
            save_file({name: tensor.contiguous() for name, tensor in part.items()}, path)


class ConditionEncoder:
    """Conditions of requests, on the CPU, in ``dtype``; ``identity`` tells these encoders from others in a store."""

    def __init__(
        self,
        load_text: Callable[[], TextEncoder],
        load_glyph: Callable[[], GlyphEncoder],
        load_image: Callable[[], ImageEncoder],
        *,
        dtype: torch.dtype,
        identity: str = "",
        store: PartStore | None = None,
    ):
        self._loaders = {"text": load_text, "glyph": load_glyph, "image": load_image}
        self._loaded: dict[str, Any] = {}
        self._parts: dict[str, Part] = {}  # the last that was asked for comes last
        self._no_glyph = torch.zeros(0, GLYPH_WIDTH, dtype=dtype)
        self.dtype, self.identity, self.store = dtype, identity, store

    def __call__(self, requests: list[Request], *, height: int = 0, width: int = 0) -> Conditions:
        """Conditions of requests, one object for equal ones; images are fitted to videos of this size in pixels."""
        self._encode_texts([request.prompt for request in requests])
        conditions = {request: self._condition(request, height, width) for request in dict.fromkeys(requests)}
        return Conditions(tuple(conditions[request] for request in requests))

    def release(self) -> None:
        """Lets go of the encoders. A part that is needed later and not known yet reads them again."""
        self._loaded.clear()

    def _condition(self, request: Request, height: int, width: int) -> Condition:
        (text,) = self._encode_texts([request.prompt])
        glyphs = glyph_text(request.prompt)
        glyph = self._part("glyph", glyphs, lambda e: {"states": e(glyphs)})["states"] if glyphs else self._no_glyph
        if request.image is None:
            return Condition(text, glyph)
        content = f"{height} x {width} {_content_of(request.image)}"
        image = self._part("image", content, lambda encoder: vars(encoder(request.image, height, width)))
        return Condition(text, glyph, ImageCondition(**image))

    def _encode_texts(self, prompts: Iterable[str]) -> list[Tensor]:
        """States of each prompt; all that are not known yet go through the language model together."""
        keys = {prompt: self._key("text", prompt) for prompt in prompts}
        known = {prompt: self._find(key) for prompt, key in keys.items()}
        missing = [prompt for prompt, part in known.items() if part is None]
        if missing:
            for prompt, states in zip(missing, self._encoder("text")(missing)):
                known[prompt] = self._keep(keys[prompt], {"states": states})
        return [known[prompt]["states"] for prompt in keys]

    def _part(self, kind: str, content: str, encode: Callable[[Any], Part]) -> Part:
        key = self._key(kind, content)
        return self._find(key) or self._keep(key, encode(self._encoder(kind)))

    def _encoder(self, kind: str):
        if kind not in self._loaded:
            self._loaded[kind] = self._loaders[kind]()
        return self._loaded[kind]

    def _key(self, kind: str, content: str) -> str:
        described = f"{kind}\0{self.identity}\0{self.dtype}\0{content}".encode(errors="surrogatepass")
        return f"{kind}-{hashlib.blake2b(described, digest_size=16).hexdigest()}"

    def _find(self, key: str) -> Part | None:
        part = self._parts.pop(key, None) or (self.store and self.store.get(key))
        return self._remember(key, part) if part else None

    def _keep(self, key: str, part: Part) -> Part:
        # The latents of an image stand beside latents that stay float32.
        part = {name: tensor if name == "latents" else tensor.to(self.dtype) for name, tensor in part.items()}
        if self.store:
            self.store.put(key, part)
        return self._remember(key, part)

    def _remember(self, key: str, part: Part) -> Part:
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
