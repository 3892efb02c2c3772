"""The tests' own checkpoint: it is complete, it samples, and its two layouts are the same weights."""

import json

import pytest
import torch
from PIL import Image

from hyvideo.models.encoders import load_glyph_encoder, load_text_encoder, load_vision_encoder
from hyvideo.models.loading import check_checkpoint, load_transformer, load_vae
from tests.tiny_checkpoint import diffusers_pipeline, write_diffusers, write_image, write_original

VERSIONS = ("480p_t2v", "480p_i2v_step_distilled")
PARTS = [
    "text_encoder/llm/config.json",
    "text_encoder/llm/tokenizer_config.json",
    "text_encoder/llm/model.safetensors",
    "text_encoder/byt5-small/config.json",
    "text_encoder/byt5-small/tokenizer_config.json",
    "text_encoder/Glyph-SDXL-v2/assets/color_idx.json",
    "text_encoder/Glyph-SDXL-v2/assets/multilingual_10-lang_idx.json",
    "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt",
    "vision_encoder/siglip/image_encoder/config.json",
    "vision_encoder/siglip/image_encoder/model.safetensors",
    "vision_encoder/siglip/feature_extractor/preprocessor_config.json",
    "scheduler/scheduler_config.json",
    *(
        f"{folder}/{file}"
        for folder in ("vae", *(f"transformer/{version}" for version in VERSIONS))
        for file in ("config.json", "diffusion_pytorch_model.safetensors")
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_original(tmp_path_factory.mktemp("tiny") / "ckpts", VERSIONS)


def test_the_original_layout_is_complete_and_small(root):
    assert [part for part in PARTS if not (root / part).is_file()] == []
    configs = [json.loads((root / "transformer" / version / "config.json").read_text()) for version in VERSIONS]
    assert [(c["ideal_task"], c["ideal_resolution"], c["use_meanflow"]) for c in configs] == [
        ("t2v", "480p", False),
        ("i2v", "480p", True),
    ]
    for version in VERSIONS:
        assert check_checkpoint(root, version, with_glyphs=True, with_images=True) == []
    files = [path for path in root.rglob("*") if path.is_file() and VERSIONS[1] not in path.parts]
    assert sum(path.stat().st_size for path in files) < 40e6


@pytest.mark.parametrize("version", VERSIONS)
def test_diffusers_samples_and_every_input_reaches_the_video(root, tmp_path, version):
    pipeline = diffusers_pipeline(root, version)
    inputs = {"num_frames": 5, "num_inference_steps": 2, "latents": torch.randn(1, 4, 2, 4, 4)}
    changes = [{"prompt": 'a cat says "OPEN"'}, {"prompt": 'a dog says "OPEN"'}, {"prompt": 'a cat says "SHUT"'}]
    if pipeline.transformer.config.task_type == "t2v":
        inputs |= {"height": 64, "width": 64}
    else:
        # The pipeline of images has no size of its own choosing.
        pipeline.video_processor.calculate_default_height_width = lambda **_: (64, 64)
        image = Image.open(write_image(tmp_path / "image.png", 64, 64))
        changes = [{"image": image} | change for change in changes]
        changes.append(changes[0] | {"image": image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)})
    prefix = _tokens_before_the_prompt(pipeline)
    assert prefix == pipeline.prompt_template_encode_start_idx == 108
    latents = [pipeline(**inputs | change, output_type="latent").frames for change in changes]
    for i, one in enumerate(latents):
        for other in latents[:i]:
            assert (one - other).abs().max() > 1e-3 * one.abs().max()
    (video,) = pipeline(**inputs | changes[0], output_type="pt").frames
    assert video.shape == (5, 3, 64, 64)
    assert video.isfinite().all() and video.std() > 0.01


@pytest.mark.parametrize("version", VERSIONS)
def test_both_layouts_and_the_pipeline_are_the_same_weights(root, tmp_path, version):
    pipeline = diffusers_pipeline(root, version)
    out = write_diffusers(root, version, tmp_path / "pipeline")
    assert check_checkpoint(out, None, with_glyphs=True, with_images=version != "480p_t2v") == []
    for folder, name in ((root, version), (out, None)):
        assert_same(load_transformer(folder, name), pipeline.transformer)
        assert_same(load_vae(folder), pipeline.vae)
        assert_same(load_text_encoder(folder)[1], pipeline.text_encoder)
        assert_same(load_glyph_encoder(folder)[1], pipeline.text_encoder_2)
        if version != "480p_t2v":
            assert_same(load_vision_encoder(folder)[1], pipeline.image_encoder)
    again = type(pipeline).from_pretrained(out, **_without_torchvision(pipeline))
    assert_same(again.transformer, pipeline.transformer)
    assert again.scheduler.config.shift == {"480p_t2v": 5.0, "480p_i2v_step_distilled": 7.0}[version]
    assert len(again.tokenizer_2) == len(again.text_encoder_2.encoder.embed_tokens.weight) == 390
    special = ["<color-0>", "<color-1>", "<en-font-0>", "<en-font-1>", "<cn-font-2>", "<jp-font-3>"]
    assert again.tokenizer_2.convert_tokens_to_ids(special) == list(range(384, 390))


def assert_same(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def _without_torchvision(pipeline):
    extractor = getattr(pipeline, "feature_extractor", None)
    return {} if extractor is None else {"feature_extractor": extractor}


def _tokens_before_the_prompt(pipeline) -> int:
    import inspect

    system = inspect.signature(pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "MARK"}]
    text = pipeline.tokenizer.apply_chat_template(messages, tokenize=False)
    return len(pipeline.tokenizer(text[: text.index("MARK")], add_special_tokens=False)["input_ids"])
