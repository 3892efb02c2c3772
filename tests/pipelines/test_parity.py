"""Parity with diffusers' pipelines on the same weights, from the original checkpoint layout to
latents and pixels.
"""

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.hunyuan_video15.encoders import load_glyph_encoder
from hyvideo.models.hunyuan_video15.prompt_encoders import GlyphEncoder
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.stock_pipeline import sample_diffusers, stock_pipeline
from tests.tiny_checkpoint import write_image, write_original

SIZE = (64, 96)
STEPS = 5
VERSIONS = ("480p_t2v", "480p_i2v")
CPU = torch.device("cpu")
ALL_KINDS = frozenset({"text", "glyph", "image"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_original(tmp_path_factory.mktemp("tiny") / "ckpts", VERSIONS)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    return write_image(tmp_path_factory.mktemp("images") / "image.png")


def config_for(root, version):
    return (
        Config()
        .with_settings(
            pretrained_model_root=str(root),
            transformer_version=version,
            dtype="fp32",
            encoder_dtype="fp32",
            vae_dtype="fp32",
            sample_n_frames=9,
            grpo_sampling_steps=STEPS,
        )
        .resolved()
    )


def loaded(config, kinds=ALL_KINDS):
    encoder, vae = load_encoder(config, CPU)
    return encoder, load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=kinds)


def sample(pipeline, schedule, encoder, request, noise):
    return pipeline.sample_ode(encoder([request], (1, *SIZE)), noise, schedule)


@pytest.mark.parametrize(
    "version, prompt, negative_prompt, has_image",
    [
        ("480p_t2v", 'a sign says "OPEN" and “左”', "", False),
        ("480p_i2v", 'the sign says "OPEN"', "blurry, a sign", True),
    ],
)
def test_guided_sampling_from_the_original_layout_equals_diffusers(
    root, image, version, prompt, negative_prompt, has_image
):
    config = config_for(root, version).with_settings(negative_prompt=negative_prompt)
    encoder, pipeline = loaded(config)
    request = Request(prompt, image if has_image else None)
    noise = normal(pipeline.latent_shape(9, *SIZE), 0, version)[None]
    ours = sample(pipeline, config.sampling.schedule(), encoder, request, noise)
    stock = stock_pipeline(config.model, pipeline, config.sampling, is_i2v=has_image)
    counts = {"num_frames": config.data.sample_n_frames, "num_steps": STEPS}
    theirs = sample_diffusers(
        stock, request, noise, SIZE, **counts, negative_prompt=negative_prompt
    )
    assert relative_difference(ours, theirs) <= 1e-5
    assert relative_difference(ours, noise) > 0.1
    (video,) = pipeline.decode(ours)
    decoded = stock.vae.decode(theirs / pipeline.vae.config.scaling_factor, return_dict=False)[0]
    expected = ((decoded[0].transpose(0, 1) / 2 + 0.5).clamp(0, 1) * 255).round()
    assert (video - expected).abs().max() <= 1


@torch.no_grad()
def test_a_batch_of_different_conditions_equals_single_samples(root, image):
    config = config_for(root, "480p_i2v")
    encoder, pipeline = loaded(config)
    conditions = encoder(
        [Request("a cat"), Request('a sign says "left"', image), Request("a dog runs away", image)],
        (5, 64, 96),
    )
    noise = normal((3, *pipeline.latent_shape(5, *SIZE)), 0, "batch")
    timestep = torch.tensor([900.0, 500.0, 991.7355])
    together = pipeline.velocity(noise, timestep, conditions)
    for row in range(3):
        alone = pipeline.velocity(
            noise[row : row + 1], timestep[row : row + 1], conditions.select([row])
        )
        assert relative_difference(together[row : row + 1], alone) < 1e-5


def test_timesteps_reach_the_model_in_float32_under_bf16_autocast(root):
    config = config_for(root, "480p_t2v").with_settings(dtype="bf16")
    encoder, pipeline = loaded(config, frozenset({"text"}))
    seen = []
    pipeline.transformer.time_embed.time_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    conditions = encoder([Request("a cat")])
    with torch.no_grad():
        out = pipeline.velocity(
            normal((1, *pipeline.latent_shape(5, *SIZE)), 0), torch.tensor([991.7355]), conditions
        )
    assert seen[0].dtype == torch.float32 and seen[0][0] == torch.tensor(991.7355)
    assert out.dtype == torch.float32 and conditions.samples[0].text.dtype == torch.bfloat16


def test_large_videos_are_decoded_in_the_tiles_of_diffusers(root):
    config = config_for(root, "480p_t2v").with_settings(vae_tile_size=64, vae_tile_overlap=0.25)
    _, vae = load_encoder(config, CPU)
    latents = normal((1, 4, 2, 6, 9), 0, "tiles")
    with torch.no_grad():
        tiled = vae.decode(latents).sample
        expected = vae.tiled_decode(latents)
        vae.use_tiling = False
        whole = vae.decode(latents).sample
    assert torch.equal(tiled, expected) and tiled.shape == whole.shape
    assert not torch.equal(tiled, whole)
    assert (vae.tile_latent_min_height, vae.tile_latent_min_width, vae.tile_overlap_factor) == (
        4,
        4,
        0.25,
    )


def test_a_prompt_may_contain_a_special_token_of_the_glyph_encoder(root):
    tokenizer, model = load_glyph_encoder(root)
    assert len(tokenizer) == model.config.vocab_size == model.encoder.embed_tokens.num_embeddings
    assert tokenizer("<color-1>").input_ids[0] == 385
    special, other = (
        GlyphEncoder(tokenizer, model)(f'Text "{text}". ') for text in ("<color-1>", "<colour1>")
    )
    assert len(special) == len(other) - 8


def test_quoted_text_above_256_tokens_is_truncated_with_a_warning_that_shows_the_rest(
    root, recwarn
):
    unit = "中"  # three bytes of UTF-8; an end token follows
    encode = GlyphEncoder(*load_glyph_encoder(root))
    whole = encode(unit * 85)
    assert len(whole) == 256 and not recwarn
    number = 256 + len(unit.encode())
    with pytest.warns(
        UserWarning,
        match=rf"{number} tokens.*256.*{unit}",
    ):
        assert torch.equal(encode(unit * (85 + 1)), whole)
