"""diffusers' pipeline with this project's weights, to compare samples from the same prompt and
initial noise.

Both use the ODE. diffusers' pipeline rounds timesteps and latents to the model's dtype between
steps, this project's keeps both in float32. In float32 the two agree up to rounding; in bf16 they
differ by about the error of bf16 itself.
"""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor

from hyvideo.data.images import fit, read_image
from hyvideo.data.prompts import Request
from hyvideo.loading.model_setup import weights_seed
from hyvideo.models.family import family_of
from hyvideo.models.hunyuan_video15 import encoders
from hyvideo.models.wan.encoders import load_text_encoder
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import ModelSettings
from tests.stock_models import stock_twin


class GivenSigmas(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler steps over this project's noise levels, which diffusers' schedule cannot
    produce.
    """

    def __init__(self, schedule: Schedule):
        super().__init__(shift=1.0)
        self.given = torch.tensor(schedule.sigmas[:-1]).tolist()  # rounded to float32

    def set_timesteps(self, num_inference_steps, device=None):
        assert num_inference_steps == len(self.given)
        super().set_timesteps(sigmas=self.given, device=device)


def sample_diffusers(
    stock,
    request: Request,
    noise: Tensor,
    size: tuple[int, int],
    *,
    num_frames: int,
    num_steps: int,
    negative_prompt: str = "",
) -> Tensor:
    """Sample latents with a `stock_pipeline`.

    Shape, like ``noise``: (1, channels, frames, height, width).
    """
    inputs = {"num_frames": num_frames, "num_inference_steps": num_steps, "output_type": "latent"}
    if isinstance(stock, WanPipeline):
        inputs |= {"guidance_scale": stock.scale}
    if request.image is None:
        inputs |= {"height": size[0], "width": size[1]}
    else:
        # diffusers' image-to-video pipeline has no size argument: it uses the image's size bucket.
        stock.video_processor.calculate_default_height_width = lambda **_: size
        inputs |= {"image": fit(read_image(request.image), *size)}
    latents = noise.to(stock.transformer.device, stock.transformer.dtype)
    return stock(
        prompt=request.prompt, negative_prompt=negative_prompt, latents=latents, **inputs
    ).frames.float()


def stock_pipeline(
    model: ModelSettings, pipeline: GRPOPipeline, sampling: Sampling, *, is_i2v: bool
):
    """Return diffusers' pipeline with ``pipeline``'s weights, diffusers' forward pass and the
    checkpoint's encoders.
    """
    if family_of(pipeline.transformer).name == "wan":
        return _wan_pipeline(model, pipeline, sampling.schedule())
    import diffusers

    # needs no torchvision
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    root, dtype = model.pretrained_model_root, DTYPES[model.dtype]
    common = {"device": pipeline.device, "random_weights_seed": weights_seed(model)}
    tokenizer, text_encoder = encoders.load_text_encoder(
        root, dtype=DTYPES[model.encoder_dtype], **common
    )
    tokenizer_2, text_encoder_2 = encoders.load_glyph_encoder(root, **common)
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "tokenizer_2": tokenizer_2,
        "text_encoder_2": text_encoder_2,
        "transformer": stock_twin(pipeline.transformer, dtype),
        "vae": pipeline.vae,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=sampling.shift),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=pipeline.sampling.guidance.scale),
    }
    if not is_i2v:
        return diffusers.HunyuanVideo15Pipeline(**parts)
    preprocessor, image_encoder = encoders.load_vision_encoder(root, dtype=dtype, **common)
    processor = SiglipImageProcessorPil(
        **{k: v for k, v in preprocessor.items() if k != "image_processor_type"}
    )
    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **parts, image_encoder=image_encoder, feature_extractor=processor
    )


def _wan_pipeline(model: ModelSettings, pipeline: GRPOPipeline, schedule: Schedule) -> WanPipeline:
    common = {"device": pipeline.device, "random_weights_seed": weights_seed(model)}
    dtype = DTYPES[model.encoder_dtype]
    tokenizer, text_encoder = load_text_encoder(model.pretrained_model_root, dtype=dtype, **common)
    stock = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        transformer=stock_twin(pipeline.transformer, DTYPES[model.dtype]),
        vae=pipeline.vae,
        scheduler=GivenSigmas(schedule),
    )
    stock.scale = pipeline.sampling.guidance.scale
    return stock
