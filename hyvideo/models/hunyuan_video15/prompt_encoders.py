"""The frozen encoders of conditions: a prompt's text, the quoted text in it, and a reference image.

The chat template and its system message come from the installed diffusers at run time.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hyvideo.data.images import fit, read_image, to_pixels
from hyvideo.models.conditions import ImageCondition
from hyvideo.models.encoders import PromptEncoder

MAX_TEXT_TOKENS = 1000
MAX_GLYPH_TOKENS = 256


class TextEncoder(PromptEncoder):
    """Hidden states of Qwen2.5-VL's language model as HunyuanVideo-1.5 reads them.

    They are the output of the third layer from the end, without the final norm, from the first token of the user's
    text on. The model is cut to the layers that are read.
    """

    def __init__(self, tokenizer, model: nn.Module):
        super().__init__(tokenizer, model)
        self.system_message = system_message()
        # The states are the input of the last layer but one: two layers and the norm would run for nothing.
        model.layers, model.norm = model.layers[:-2], nn.Identity()
        # Template tokens before the user's text: the common beginning of two different prompts.
        first, second = self._all_token_ids("a"), self._all_token_ids("b")
        self.crop_start = crop = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
        assert tokenizer.decode(first[:crop]).endswith("user\n"), "the crop must fall where the user's text begins"

    def _token_ids(self, prompt: str) -> list[int]:
        """Template and prompt, cut on the right as in the original where they are too long."""
        ids = self._all_token_ids(prompt)
        longest = self.crop_start + MAX_TEXT_TOKENS
        if len(ids) > longest:
            self._warn_of_cut(len(ids) - self.crop_start, MAX_TEXT_TOKENS, ids[longest:], "assistant\n")
        return ids[:longest]

    def _states(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).last_hidden_state[:, self.crop_start :]

    def _all_token_ids(self, prompt: str) -> list[int]:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        messages = format_text_input([prompt], self.system_message)
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return encoded["input_ids"][0]


def system_message() -> str:
    """The system message of the chat template, from the installed diffusers."""
    from diffusers import HunyuanVideo15Pipeline

    return inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default


class GlyphEncoder:
    """Hidden states of ByT5 trained on glyphs: the spelling of text that is to be seen in the video."""

    def __init__(self, tokenizer, model: nn.Module):
        self.tokenizer, self.model = tokenizer, model

    @torch.no_grad()
    def __call__(self, text: str) -> Tensor:
        """States of a text from `glyph_text`, on the CPU. Shape: (tokens, 1472)."""
        ids = self.tokenizer(text, truncation=True, max_length=MAX_GLYPH_TOKENS, return_tensors="pt").input_ids
        return self.model(input_ids=ids.to(self.model.device))[0][0].cpu()


def glyph_text(prompt: str) -> str:
    """The quoted texts of a prompt as ByT5 reads them; empty without."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    return extract_glyph_texts(prompt) or ""


class ImageEncoder:
    """Features by SigLIP and latents by the VAE of a reference image, fitted to the video.

    ``preprocessor`` has the values of SigLIP's preprocessor_config.json. The VAE encodes a whole frame: in tiles it
    would be another one.
    """

    def __init__(self, preprocessor: dict[str, Any], model: nn.Module, vae: nn.Module):
        self.preprocessor, self.model, self.vae = preprocessor, model, vae

    @torch.no_grad()
    def __call__(self, path: str, height: int, width: int) -> ImageCondition:
        """The condition of an image file, on the CPU; the size is the video's, in pixels."""
        image = fit(read_image(path), height, width)
        pixels = siglip_pixels(image, self.preprocessor).to(self.model.device, self.model.dtype)
        embeds = self.model(pixel_values=pixels[None]).last_hidden_state[0]
        frame = to_pixels(image).to(self.vae.device, self.vae.dtype)
        tiling, self.vae.use_tiling = self.vae.use_tiling, False
        latents = self.vae.encode(frame[None, :, None]).latent_dist.mode()[0, :, 0]
        self.vae.use_tiling = tiling
        return ImageCondition(embeds.cpu(), (latents.float() * self.vae.config.scaling_factor).cpu())


def siglip_pixels(image: Image.Image, preprocessor: Mapping[str, Any]) -> Tensor:
    """Pixels as SigLIP reads them: (x * rescale_factor - image_mean) / image_std of the image squeezed to its size.

    ``preprocessor``: the contents of preprocessor_config.json. The image is resized whatever ``do_resize`` says, as
    in the pipeline, because the tower takes one size. Pillow resizes, whether torchvision is installed or not.
    Raises ValueError for values that are missing and steps that SigLIP does not have. Shape: float32 (3, size, size).
    """
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    needed = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    missing = [name for name in needed if preprocessor.get(name) is None]
    foreign = [name for name in ("do_center_crop", "do_pad") if preprocessor.get(name)]
    size = preprocessor.get("size")
    if missing or foreign or not isinstance(size, Mapping) or set(size) != {"height", "width"}:
        raise ValueError(
            "SigLIP's preprocessor_config.json only resizes to a height and width, rescales and normalizes; "
            f"got size {size!r}, got {', '.join(foreign) or 'no other step'}, missing {', '.join(missing) or 'nothing'}"
        )
    processor = SiglipImageProcessorPil.from_dict(dict(preprocessor))
    return processor.preprocess(images=image, do_resize=True, return_tensors="pt").pixel_values[0].float()
