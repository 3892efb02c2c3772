"""Prompts and reference images to conditions: every distinct part is encoded once.

    text     Qwen2.5-VL hidden states of the prompt        always
    glyph    ByT5 states of the text in double quotes      only where there is some
    image    SigLIP features and VAE latents of an image   only in image-to-video

The encoders are read from disk when the first part needs them and can be let go (`ConditionEncoder.release`). With a
`PartStore` the parts outlive the run: a second run over the same prompts reads no language model at all. The chat
template and its system message come from the installed diffusers at run time.
"""

import functools
import hashlib
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.data.images import fit, read_image, siglip_pixels, to_pixels
from hyvideo.data.prompts import Request
from hyvideo.pipelines.conditions import GLYPH_WIDTH, Condition, Conditions, ImageCondition

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256
_BATCH = 8  # prompts of one length that the language model reads together
_KEPT = 256  # parts held in memory when they are also on disk

Part = dict[str, Tensor]


class TextEncoder:
    """Qwen2.5-VL's language model as HunyuanVideo-1.5 reads it.

    The output of the third layer from the end, without the final norm, from the first token of the user's text on.

    Args:
        tokenizer: Qwen2 tokenizer with a chat template.
        model: ``Qwen2_5_VLTextModel``; it is cut to the layers that are read.
    """

    def __init__(self, tokenizer, model: nn.Module):
        from diffusers import HunyuanVideo15Pipeline

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
        self.system_message = signature.parameters["system_message"].default
        # What is read is the input of the last layer but one: two layers and the norm would run for nothing.
        model.layers, model.norm = model.layers[:-2], nn.Identity()
        self.tokenizer, self.model = tokenizer, model
        self.crop_start = self._find_crop_start()

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> list[Tensor]:
        """States of each prompt on the CPU; prompts of one length together, so that none is padded.

        Shape of each: (tokens, dim).
        """
        token_ids = [self._token_ids(prompt) for prompt in prompts]
        by_length: dict[int, list[int]] = {}
        for i, ids in enumerate(token_ids):
            by_length.setdefault(len(ids), []).append(i)
        states: list[Tensor] = [torch.empty(0)] * len(prompts)
        for rows in by_length.values():
            for start in range(0, len(rows), _BATCH):
                batch = rows[start : start + _BATCH]
                ids = torch.tensor([token_ids[i] for i in batch], device=self.model.device)
                hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state
                for i, row in zip(batch, hidden[:, self.crop_start :].cpu()):
                    states[i] = row.clone()
        return states

    def _token_ids(self, prompt: str) -> list[int]:
        """Template and prompt, cut on the right as in the original where they are too long."""
        ids = self._all_token_ids(prompt)
        longest = self.crop_start + MAX_TEXT_TOKENS
        if len(ids) > longest:
            cut = self.tokenizer.decode(ids[longest:], skip_special_tokens=True).removesuffix("assistant\n").strip()
            warnings.warn(
                f"a prompt has {len(ids) - self.crop_start} tokens, the model reads {MAX_TEXT_TOKENS}; "
                f"left out from the end: {_shown(cut)}",
                stacklevel=2,
            )
        return ids[:longest]

    def _all_token_ids(self, prompt: str) -> list[int]:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        messages = format_text_input([prompt], self.system_message)
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return encoded["input_ids"][0]

    def _find_crop_start(self) -> int:
        """Number of template tokens before the user's text: the common beginning of two different prompts."""
        first, second = self._all_token_ids("a"), self._all_token_ids("b")
        crop = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
        assert self.tokenizer.decode(first[:crop]).endswith("user\n"), "the crop must fall where the user's text begins"
        return crop


class GlyphEncoder:
    """ByT5 trained on glyphs: how text that is to be seen in the video is spelt."""

    def __init__(self, tokenizer, model: nn.Module):
        self.tokenizer, self.model = tokenizer, model

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        """States of what `glyph_text` gives, on the CPU. Shape: (tokens, 1472)."""
        ids = self.tokenizer(text, truncation=True, max_length=MAX_GLYPH_TOKENS, return_tensors="pt").input_ids
        return self.model(input_ids=ids.to(self.model.device))[0][0].cpu()


def glyph_text(prompt: str) -> str:
    """The quoted texts of a prompt as ByT5 reads them; empty without."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    return extract_glyph_texts(prompt) or ""


class ImageEncoder:
    """A reference image, fitted to the video: SigLIP's features and the VAE's latents of the first frame.

    Args:
        preprocessor: Values of SigLIP's preprocessor_config.json.
        vae: Encodes a whole frame: in tiles it would be another one.
    """

    def __init__(self, preprocessor: dict[str, Any], model: nn.Module, vae: nn.Module):
        self.preprocessor, self.model, self.vae = preprocessor, model, vae

    @torch.no_grad()
    def __call__(self, path: str, height: int, width: int) -> ImageCondition:
        """Both on the CPU; the size is the video's, in pixels."""
        image = fit(read_image(path), height, width)
        pixels = siglip_pixels(image, self.preprocessor).to(self.model.device, self.model.dtype)
        embeds = self.model(pixel_values=pixels[None]).last_hidden_state[0]
        frame = to_pixels(image).to(self.vae.device, self.vae.dtype)
        tiling, self.vae.use_tiling = self.vae.use_tiling, False
        latents = self.vae.encode(frame[None, :, None]).latent_dist.mode()[0, :, 0]
        self.vae.use_tiling = tiling
        return ImageCondition(embeds.cpu(), (latents.float() * self.vae.config.scaling_factor).cpu())


class PartStore:
    """Encoded parts on disk, one file each, named by a hash of what was encoded and by what."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def get(self, key: str) -> Part | None:
        """The part, or None where it is not stored or its file is damaged (it is then made again)."""
        try:
            return load_file(self.folder / f"{key}.safetensors")
        except (FileNotFoundError, SafetensorError):
            return None

    def put(self, key: str, part: Part) -> None:
        """Stores a part, complete or not at all, whoever else stores the same one now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{key}.{os.getpid()}.partial"
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, aside)
        os.replace(aside, self.folder / f"{key}.safetensors")


class ConditionEncoder:
    """Requests to conditions on the CPU.

    Args:
        load_text, load_glyph, load_image: Read an encoder from disk; called when the first part needs it.
        dtype: Of text, glyph and vision states: what the transformer computes in.
        identity: Tells the encoders of this run from others, for the store.
        store: Where parts outlive the run.
    """

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
        self._parts: OrderedDict[str, Part] = OrderedDict()
        self._no_glyph = torch.zeros(0, GLYPH_WIDTH, dtype=dtype)
        self.dtype, self.identity, self.store = dtype, identity, store

    def __call__(self, requests: list[Request], *, height: int = 0, width: int = 0) -> Conditions:
        """Conditions of a batch, one for each request; a request that comes again is the same object.

        Args:
            height, width: Of the videos in pixels, which reference images are fitted to.
        """
        self._encode_texts([request.prompt for request in requests])
        made = {request: self._condition(request, height, width) for request in dict.fromkeys(requests)}
        return Conditions(tuple(made[request] for request in requests))

    def release(self) -> None:
        """Lets go of the encoders. What is asked for later and not known yet reads them again."""
        self._loaded.clear()

    def _condition(self, request: Request, height: int, width: int) -> Condition:
        (text,) = self._encode_texts([request.prompt])
        glyphs = glyph_text(request.prompt)
        glyph = self._part("glyph", glyphs, lambda e: {"states": e(glyphs)})["states"] if glyphs else self._no_glyph
        if request.image is None:
            return Condition(text, glyph)

        def encode(encoder: ImageEncoder) -> Part:
            image = encoder(request.image, height, width)
            return {"embeds": image.embeds, "latents": image.latents}

        part = self._part("image", f"{height} x {width} {_content_of(request.image)}", encode)
        return Condition(text, glyph, ImageCondition(part["embeds"], part["latents"]))

    def _encode_texts(self, prompts: Iterable[str]) -> list[Tensor]:
        """States of each prompt; all that are not known yet go through the language model together."""
        keys = {prompt: self._key("text", prompt) for prompt in prompts}
        known = {prompt: self._find(key) for prompt, key in keys.items()}
        missing = [prompt for prompt, part in known.items() if part is None]
        if missing:
            for prompt, states in zip(missing, self._encoder("text")(missing)):
                known[prompt] = self._keep("text", keys[prompt], {"states": states})
        return [known[prompt]["states"] for prompt in keys]

    def _part(self, kind: str, content: str, encode: Callable[[Any], Part]) -> Part:
        key = self._key(kind, content)
        part = self._find(key)
        return self._keep(kind, key, encode(self._encoder(kind))) if part is None else part

    def _encoder(self, kind: str):
        if kind not in self._loaded:
            self._loaded[kind] = self._loaders[kind]()
        return self._loaded[kind]

    def _key(self, kind: str, content: str) -> str:
        described = f"{kind}\0{self.identity}\0{self.dtype}\0{content}".encode(errors="surrogatepass")
        return f"{kind}-{hashlib.blake2b(described, digest_size=16).hexdigest()}"

    def _find(self, key: str) -> Part | None:
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        part = self.store.get(key) if self.store else None
        return self._remember(key, part) if part else None

    def _keep(self, kind: str, key: str, part: Part) -> Part:
        # The latents of an image stand beside latents that stay float32.
        part = {name: tensor if name == "latents" else tensor.to(self.dtype) for name, tensor in part.items()}
        if self.store:
            self.store.put(key, part)
        return self._remember(key, part)

    def _remember(self, key: str, part: Part) -> Part:
        self._parts[key] = part
        if self.store and len(self._parts) > _KEPT:
            self._parts.popitem(last=False)
        return part


@functools.lru_cache(maxsize=4096)
def _content_of(path: str) -> str:
    """Hash of a file, so that an image that was replaced is encoded again."""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ValueError(f"a reference image must be a readable file, got {path!r} ({error.strerror})") from error


def _shown(text: str, longest: int = 200) -> str:
    return repr(text if len(text) <= longest else f"{text[:longest]}...")
