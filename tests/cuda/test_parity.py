"""Our sampling against diffusers' pipeline, on the weights of CHECK_MODEL_PATH or, by default, a
tiny checkpoint.
"""

import gc
import os

import pytest

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import (
    check_checkpoint,
    load_encoder,
    load_pipeline,
)
from hyvideo.models.versions import version_defaults
from hyvideo.pipelines.grpo_pipeline import DTYPES
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference, seconds_of
from tests.cuda.workload import DEVICE
from tests.stock_pipeline import sample_diffusers, stock_pipeline
from tests.tiny_checkpoint import write_image, write_original
from tests.tiny_wan import write_wan

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The checkpoint folder and the version."""
    version = os.environ.get("CHECK_VERSION", "480p_t2v")
    folder = os.environ.get("CHECK_MODEL_PATH")
    if folder is None and version_defaults(version).family == "wan":
        folder = write_wan(tmp_path_factory.mktemp("tiny") / "ckpts")
    return str(
        folder or write_original(tmp_path_factory.mktemp("tiny") / "ckpts", (version,))
    ), version


@pytest.mark.parametrize("dtype", ["fp32", "bf16"] if DEVICE.type == "cuda" else ["fp32"])
def test_samples_match_diffusers(gpu, released, tmp_path, record_property, dtype):
    """The bf16 tolerance covers rounding, multiplied by guidance: about 0.3 after a few steps of
    small models.
    """
    gc.collect()  # frees the models of the other precision
    root, version = released
    is_real, is_i2v = "CHECK_MODEL_PATH" in os.environ, "i2v" in version
    steps, frames, size = (5, 33, (480, 832)) if is_real else (2, 5, (32, 48))
    settings = {
        "pretrained_model_root": root,
        "transformer_version": version,
        "dtype": dtype,
        "encoder_dtype": dtype,
    }
    settings |= {"vae_dtype": "fp32" if dtype == "fp32" else "fp16", "sample_n_frames": frames}
    config = Config().with_settings(**settings, grpo_sampling_steps=steps).resolved()
    image = write_image(tmp_path / "image.png") if is_i2v else None
    request = Request('A cat walks past a sign that says "OPEN", realistic style.', image)
    kinds = check_checkpoint(config, {"this call": [request]}, [(frames, *size)])
    encoder, vae = load_encoder(config, gpu)
    pipeline = load_pipeline(
        config, gpu, encoder=encoder, vae=vae, kinds=kinds, weights_dtype=DTYPES[dtype]
    )
    noise = normal(pipeline.latent_shape(frames, *size), 0, "parity")[None]
    conditions = encoder([request], (1, *size)).to(gpu)
    encoder.release()
    latents = {}

    def ours():
        latents["ours"] = pipeline.sample_ode(conditions, noise.to(gpu), config.sampling.schedule())

    def theirs():
        counts = {
            "num_frames": frames,
            "num_steps": steps,
            "negative_prompt": config.data.negative_prompt,
        }
        latents["diffusers"] = sample_diffusers(stock, request, noise, size, **counts)

    ours()  # warm-up
    record_property("ours, s", seconds_of(ours, gpu))
    # diffusers' pipeline loads its own encoders, and both do not fit together with float32 weights
    gc.collect()
    stock = stock_pipeline(config.model, pipeline, config.sampling, is_i2v=is_i2v)
    record_property("diffusers with its text encoding, s", seconds_of(theirs, gpu))
    difference = relative_difference(*latents.values())
    record_property("difference", difference)
    assert difference < (1e-4 if dtype == "fp32" else 1)
