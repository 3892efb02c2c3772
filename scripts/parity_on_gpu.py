"""Our sampling against diffusers' pipeline at full size: for who has the weights and a GPU.

    python -m scripts.parity_on_gpu --model_path ckpts --transformer_version 480p_t2v
    python -m scripts.parity_on_gpu --model_path ckpts --transformer_version 480p_i2v --image_path cat.png

Both sample the same prompt from the same noise, a few steps without added noise. What to expect of the largest
difference over the largest value: about 1e-5 with --dtype fp32 (twice the memory; a small --video_length helps). With
bf16 the two differ by what bf16 costs, which guidance multiplies: diffusers' pipeline rounds timesteps and latents to
bf16 between steps, ours does not. Small random models give 1e-6 to 3e-5 in fp32 and 0.3 in bf16 after a few guided
steps. The transformer's weights are in memory once; diffusers' masks need some gigabytes more.
"""

import argparse
import gc
import sys
from pathlib import Path

from hyvideo.data.outside import Parser, refusals


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model_path", default="ckpts")
    parser.add_argument("--transformer_version", default="480p_t2v")
    parser.add_argument("--config", help="YAML, for a model that is not one of the released versions")
    parser.add_argument("--prompt", default='A cat walks past a sign that says "OPEN", realistic style.')
    parser.add_argument("--image_path", help="first frame, for an i2v version")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--num_inference_steps", type=int, default=5)
    parser.add_argument("--video_length", type=int, default=33)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=848)
    return parser.parse_args()


@refusals("parity_on_gpu.py")
def main() -> int:
    options = parse()

    from hyvideo.config.command_line import load_config
    from hyvideo.config.settings import Config
    from hyvideo.data.prompts import Request
    from hyvideo.data.randomness import normal
    from hyvideo.evaluation.parity import relative_difference, sample_diffusers, stock_pipeline
    from hyvideo.models.attention_kernels import use_fastest_kernels
    from hyvideo.pipelines.hunyuan_video_grpo_pipeline import DTYPES
    from hyvideo.records.stage_timer import StageTimer
    from hyvideo.training.model_setup import check_checkpoint, choose_device, load_encoder, load_pipeline

    settings = {
        "pretrained_model_root": options.model_path,
        "transformer_version": options.transformer_version,
        "dtype": options.dtype,
        "encoder_dtype": options.dtype,
        "sample_n_frames": options.video_length,
        "grpo_sampling_steps": options.num_inference_steps,
        "vae_dtype": "fp32" if options.dtype == "fp32" else "fp16",
    }
    if options.config:
        config = load_config(Path(options.config), **settings)
    else:
        config = Config().with_settings(**settings).resolved()
    request = Request(options.prompt, options.image_path)
    size = options.height, options.width
    needs = check_checkpoint(config, {"this call": [request]}, [(options.video_length, *size)])
    device = choose_device(config.model.device)
    kernels = use_fastest_kernels()
    encoder, vae = load_encoder(config, device)
    dtype = DTYPES[options.dtype]
    pipeline = load_pipeline(config, device, encoder=encoder, vae=vae, trained=needs, weights_dtype=dtype)
    noise = normal(pipeline.latent_shape(options.video_length, *size), 0, "parity")[None]
    conditions = encoder([request], height=size[0], width=size[1]).to(device)
    encoder.release()
    timer = StageTimer(device)
    pipeline.with_steps(1).sample_ode(conditions, noise.to(device))  # warms up
    with timer("ours"):
        ours = pipeline.sample_ode(conditions, noise.to(device))
    gc.collect()  # diffusers' pipeline gets encoders of its own: both would not fit beside float32 weights
    stock = stock_pipeline(config.model, pipeline, is_i2v=request.image is not None)
    steps, negative = options.num_inference_steps, config.data.negative_prompt
    others = {"num_frames": options.video_length, "num_steps": steps, "negative_prompt": negative}
    with timer("diffusers"):
        theirs = sample_diffusers(stock, request, noise, size, **others)
    difference = relative_difference(ours, theirs)
    print(f"{config.model.transformer_version}, {options.dtype}, {steps} steps, attention by {kernels}")
    print(f"latents {tuple(ours.shape)}: largest difference {difference:.2e} of the largest value")
    seconds = timer.metrics()
    print(f"ours {seconds['time/ours']:.2f} s, diffusers {seconds['time/diffusers']:.2f} s (with its text encoding)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
