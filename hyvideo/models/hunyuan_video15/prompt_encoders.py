"""Frozen encoders of conditions: the prompt, quoted text in the prompt, and a reference image.

The chat template and its system message are taken from the installed diffusers at run time.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hyvideo.data.images import fit, read_image, to_pixels
from hyvideo.models.conditions import ImageCondition
from hyvideo.models.encoders import PromptEncoder, warn_of_truncation
from hyvideo.models.offload import device_of, on_device

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256


class TextEncoder(PromptEncoder):
    """Encoder of prompts by Qwen2.5-VL's language model, with which HunyuanVideo-1.5 was trained.

    It returns the output of the third layer from the end, without the final norm, starting at the
    first token of the user's text. Unused layers are removed from the model.
    """

    def __init__(self, tokenizer, model: nn.Module):
        super().__init__(tokenizer, model)
        self.system_message = system_message()
        # The states are the input of the second-to-last layer: the last two layers and the norm are
        # not needed.
        model.layers = model.layers[:-2]
        model.norm = nn.Identity()
        # Number of template tokens before the user's text: the common prefix of two different
        # prompts.
        first, second = self._all_token_ids("a"), self._all_token_ids("b")
        self.crop_start = crop = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
        assert tokenizer.decode(first[:crop]).endswith("user\n"), (
            "crop_start must be where the user's text begins"
        )

    def _token_ids(self, prompt: str) -> list[int]:
        """Return the tokens of template and prompt, truncated on the right as in the original."""
        ids = self._all_token_ids(prompt)
        longest = self.crop_start + MAX_TEXT_TOKENS
        if len(ids) > longest:
            self._warn_of_truncation(
                len(ids) - self.crop_start, MAX_TEXT_TOKENS, ids[longest:], "assistant\n"
            )
        return ids[:longest]

    def _states(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).last_hidden_state[:, self.crop_start :]

    def _all_token_ids(self, prompt: str) -> list[int]:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        messages = format_text_input([prompt], self.system_message)
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return encoded["input_ids"][0]


def system_message() -> str:
    """Return the system message of the chat template, from the installed diffusers."""
    from diffusers import HunyuanVideo15Pipeline

    return (
        inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
        .parameters["system_message"]
        .default
    )


class GlyphEncoder:
    """Encoder of quoted text, which should appear in the video, by glyph-trained ByT5."""

    def __init__(self, tokenizer, model: nn.Module):
        self.tokenizer = tokenizer
        self.model = model

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        """Return the states of a text from `glyph_text`, on the CPU. Shape: (tokens, 1472).

        ByT5 has one token per byte of UTF-8, of which `MAX_GLYPH_TOKENS` are read, with a warning
        for a longer text.
        """
        every_id = self.tokenizer(text, verbose=False).input_ids
        if len(every_id) > MAX_GLYPH_TOKENS:  # the last one that is read is the end token
            dropped = self.tokenizer.decode(
                every_id[MAX_GLYPH_TOKENS - 1 :], skip_special_tokens=True
            )
            warn_of_truncation(
                "the quoted text of a prompt", len(every_id), MAX_GLYPH_TOKENS, dropped
            )
        ids = self.tokenizer(
            text, truncation=True, max_length=MAX_GLYPH_TOKENS, return_tensors="pt"
        ).input_ids
        return self.model(input_ids=ids.to(self.model.device))[0][0].cpu()


def glyph_text(prompt: str) -> str:
    """Return the quoted texts of a prompt in ByT5's input format, or an empty string if there are
    none.
    """
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    return extract_glyph_texts(prompt) or ""


class ImageEncoder:
    """Encoder of a reference image, resized and cropped to the video size, into SigLIP features and
    VAE latents.

    ``preprocessor`` is the content of SigLIP's preprocessor_config.json. Tiling is disabled while
    the VAE encodes the image, because it would change the latents.
    """

    def __init__(self, preprocessor: dict[str, Any], model: nn.Module, vae: nn.Module):
        self.preprocessor = preprocessor
        self.model = model
        self.vae = vae

    @torch.no_grad()
    def __call__(self, path: str, height: int, width: int) -> ImageCondition:
        """Return the condition of an image file, on the CPU.

        ``height`` and ``width`` describe the video, in pixels.
        """
        image = fit(read_image(path), height, width)
        pixels = siglip_pixels(image, self.preprocessor).to(self.model.device, self.model.dtype)
        embeds = self.model(pixel_values=pixels[None]).last_hidden_state[0]
        frame = to_pixels(image).to(device_of(self.vae), self.vae.dtype)
        tiling = self.vae.use_tiling
        self.vae.use_tiling = False
        with on_device(self.vae):
            latents = self.vae.encode(frame[None, :, None]).latent_dist.mode()[0, :, 0]
        self.vae.use_tiling = tiling
        return ImageCondition(
            embeds.cpu(), (latents.float() * self.vae.config.scaling_factor).cpu()
        )


def siglip_pixels(image: Image.Image, preprocessor: Mapping[str, Any]) -> Tensor:
    """Return SigLIP's input: (x * rescale_factor - image_mean) / image_std of the resized image.

    ``preprocessor`` is the content of preprocessor_config.json. The image is resized regardless of
    ``do_resize``, as in the pipeline, because the model accepts only one size. Pillow is used even
    if torchvision is installed. Shape: float32 (3, size, size).
    """
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor = SiglipImageProcessorPil.from_dict(dict(preprocessor))
    return (
        processor.preprocess(images=image, do_resize=True, return_tensors="pt")
        .pixel_values[0]
        .float()
    )
