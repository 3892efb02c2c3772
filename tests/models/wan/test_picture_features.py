"""Image-to-video of Wan2.1, which attends to CLIP's features of the first frame, and FLF2V, which
attends to those of the first and the last: diffusers' states, velocity and guided latents, names, and
LoRAs.

tests/golden/wan_i2v has outputs of diffusers' WanImageToVideoPipeline with a tiny random model in the
released layout, in float32.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

from hyvideo.data.prompts import Request
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.loading.model_setup import check_checkpoint as check_run
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.conditions import Condition, ImageCondition
from hyvideo.models.family import install, new_model
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import (
    add_lora,
    add_trainable_lora,
    current_lora,
    fit_lora,
    training_config,
)
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.saving import save_original
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.models.wan.settings import (
    transformer_config_to_diffusers,
    transformer_config_to_original,
    transformer_to_diffusers,
    transformer_to_original,
)
from hyvideo.planning.flops import count_parameters
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.models.wan.tiny import FAMILY, inputs, tiny

GOLDEN = Path(__file__).parents[2] / "golden" / "wan_i2v"
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (9, 64, 96)  # frames, height, width: 3 x 8 x 12 latents
CPU = torch.device("cpu")
FEATURES = {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 72}
TWO = {"pos_embed_seq_len": 514}  # features of a first and a last frame
VERSIONS = {"i2v": "wan2.1_i2v_14b_480p", "flf2v": "wan2.1_flf2v_14b_720p"}
TENSORS = {"i2v": 1303, "flf2v": 1304}
PARAMETERS = {"i2v": 16_394_878_784, "flf2v": 16_395_536_704}
each_task = pytest.mark.parametrize("task", ["i2v", "flf2v"])


def tiny_with_features(**sizes):
    model = tiny(**FEATURES | sizes)
    positions = model.condition_embedder.image_embedder.pos_embed
    if positions is not None:  # zeros in a new model
        with torch.no_grad():
            positions.normal_(generator=torch.Generator().manual_seed(0))
    return model


def with_features(batch=2, pictures=1):
    """Return inputs whose conditions have a given video and 257 features of each given frame."""
    arguments = inputs(batch)
    generator = torch.Generator().manual_seed(6)
    shape = (8, *arguments["latents"].shape[2:])  # a mask and four channels
    conditions = []
    for sample in arguments["conditions"]:
        given = torch.randn(shape, generator=generator)
        features = torch.randn(257 * pictures, 20, generator=generator)
        conditions.append(replace(sample, image=ImageCondition(features, given)))
    return arguments | {"conditions": conditions}


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Both models have the same encoders."""
    folder = tmp_path_factory.mktemp("golden")
    for task in VERSIONS:
        shutil.copytree(GOLDEN / "i2v", folder / task)
    shutil.copytree(GOLDEN / "flf2v", folder / "flf2v", dirs_exist_ok=True)
    return {task: folder / task for task in VERSIONS}


def request_of(task):
    images = ("first.png", "last.png") if task == "flf2v" else ("first.png",)
    return Request(PROMPT, *(str(GOLDEN / name) for name in images))


def config_of(root, task):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": VERSIONS[task],
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "sample_n_frames": SIZE[0],
        "height": SIZE[1],
        "width": SIZE[2],
        "cfg_scale": 5.0,
        "negative_prompt": NEGATIVE,
    }
    return Config().with_settings(**settings).resolved()


@pytest.fixture(scope="module")
def loaded(roots):
    """Return the encoder, the encoded request and the pipeline of each model."""
    found = {}
    for task, root in roots.items():
        config = config_of(root, task)
        encoder, vae = load_encoder(config, CPU)
        kinds = frozenset({"text", "image"})
        pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=kinds)
        found[task] = encoder, encoder([request_of(task)], SIZE), pipeline
    return found


@each_task
def test_texts_features_and_given_video_equal_diffusers(loaded, golden, task):
    (condition,) = loaded[task][1].samples
    torch.testing.assert_close(condition.text, golden["text"], atol=1e-6, rtol=1e-6)
    features = golden[f"{task}.clip_states"].flatten(0, 1)
    torch.testing.assert_close(condition.image.embeds, features, atol=1e-5, rtol=0)
    given = golden[f"{task}.condition"][0]
    assert torch.equal(condition.image.latents[:4], given[:4])  # the mask
    torch.testing.assert_close(condition.image.latents, given, atol=1e-5, rtol=0)


def test_first_and_last_frame_are_not_interchangeable(loaded, golden):
    encoder, right, pipeline = loaded["flf2v"]
    request = request_of("flf2v")
    swapped = replace(request, image=request.last_image, last_image=request.image)
    found = pipeline.sample_ode(encoder([swapped], SIZE), golden["noise"], Schedule.ode(3, 3.0))
    assert relative_difference(found[0], golden["flf2v.latents"][-1]) > 1e-2
    same = replace(
        request, last_image=request.image
    )  # another part, although its first is the same
    (other,), (first,) = encoder([same], SIZE).samples, right.samples
    assert torch.equal(other.image.embeds[:257], first.image.embeds[:257])
    assert relative_difference(other.image.embeds[257:], first.image.embeds[257:]) > 1e-2


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each_task
def test_the_velocity_of_two_samples_equals_diffusers(loaded, golden, task):
    """The inputs are those of the file's recipe: noise of fixed seeds."""
    transformer = loaded[task][2].transformer
    pictures = 2 if task == "flf2v" else 1
    latents = noise(50, 2, 36, 3, 8, 12)
    states = noise(60, 2 * pictures, 257, 32) + 2 * noise(70, 2 * pictures, 1, 32)
    states = states.reshape(2, pictures * 257, 32)
    texts = (noise(40, 7, 32), noise(41, 5, 32))
    conditions = [
        Condition(text, image=ImageCondition(embeds, given))
        for text, embeds, given in zip(texts, states, latents[:, 16:])
    ]
    with torch.no_grad():
        found = transformer(latents[:, :16], torch.tensor([991.7355, 412.25]), conditions)
    difference = relative_difference(found, golden[f"{task}.velocity"])
    print(f"difference {difference:.2g}")
    assert difference <= 1e-6


@each_task
def test_guided_latents_equal_diffusers(loaded, golden, task):
    _, conditions, pipeline = loaded[task]
    found = pipeline.sample_ode(conditions, golden["noise"], Schedule.ode(3, 3.0))
    difference = relative_difference(found[0], golden[f"{task}.latents"][-1])
    print(f"difference {difference:.2g}")
    assert difference <= 2e-6


def test_the_features_change_the_velocity(golden):
    model, arguments = tiny_with_features(), with_features(1)
    install(model)
    (sample,) = arguments["conditions"]
    other = replace(sample, image=ImageCondition(-sample.image.embeds, sample.image.latents))
    with torch.no_grad():
        first = model(**arguments)
        second = model(**arguments | {"conditions": [other]})
    assert relative_difference(second, first) > 0.01


# --- files ----------------------------------------------------------------------------------------


@each_task
def test_the_released_model_has_its_number_of_parameters_and_tensors(task):
    sizes = released_sizes(VERSIONS[task])
    with torch.device("meta"):
        arguments = {name: value for name, value in sizes.transformer.items() if name[0] != "_"}
        model = new_model(FAMILY.transformer, arguments)
    state = model.state_dict()
    assert len(state) == TENSORS[task]
    assert sum(tensor.numel() for tensor in state.values()) == PARAMETERS[task]
    original = transformer_to_original(state)
    assert {"img_emb.proj.4.weight", "blocks.39.cross_attn.k_img.bias"} <= original.keys()
    if task == "flf2v":  # diffusers' converter leaves its name unchanged
        original["condition_embedder.image_embedder.pos_embed"] = original.pop("img_emb.emb_pos")
    assert convert_wan_transformer_to_diffusers(dict(original)).keys() == state.keys()


@each_task
def test_names_and_settings_of_the_original_round_trip(tmp_path, task):
    model = tiny_with_features(text_dim=4096, **TWO if task == "flf2v" else {})
    state = model.state_dict()
    renamed = transformer_to_diffusers(transformer_to_original(state))
    assert all(torch.equal(renamed[name], tensor) for name, tensor in state.items())
    config = transformer_config_to_original(model.config)
    assert config["model_type"] == task
    assert transformer_config_to_diffusers(config)["image_dim"] == 20
    save_original(model, tmp_path / "transformer" / "mine", dtype=torch.float32)
    loaded = load_transformer(tmp_path, "mine")
    assert loaded.config.added_kv_proj_dim == 72
    assert loaded.config.pos_embed_seq_len == model.config.pos_embed_seq_len
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("task", ["i2v", "flf2v", "a14b"])
def test_files_with_the_names_of_the_authors_or_of_comfyui_load(tmp_path, task):
    """Their config.json has no word of the features; that of A14B, which has none, is alike."""
    if task == "a14b":
        model = tiny(in_channels=12, text_dim=4096)
    else:
        positions = TWO if task == "flf2v" else {}
        model = tiny_with_features(text_dim=4096, image_dim=1280, **positions)
    folder = tmp_path / "transformer" / "mine"
    save_original(model, folder, dtype=torch.float32)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    released = {
        name: config[name] for name in config if "image" not in name and "added" not in name
    }
    released.pop("pos_embed_seq_len", None)
    path.write_text(json.dumps(released | {"model_type": "i2v" if task == "a14b" else task}))
    loaded = load_transformer(tmp_path, "mine")
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in state.items())
    sizes = read_architecture(tmp_path, "mine")
    assert count_parameters(sizes).total == sum(tensor.numel() for tensor in state.values())


def test_a_missing_or_cut_image_encoder_is_named_before_anything_is_loaded(roots, tmp_path):
    root = roots["i2v"]
    requests = [request_of("i2v")]
    version = VERSIONS["i2v"]
    assert not check_checkpoint(root, version, requests)
    broken = Path(shutil.copytree(root, tmp_path / "broken"))
    (broken / "image_encoder" / "model.safetensors").unlink()
    (problem,) = check_checkpoint(broken, version, requests)
    assert "image encoder" in problem
    shutil.rmtree(broken / "image_processor")
    (problem,) = check_checkpoint(broken, version, requests)
    assert "preprocessor_config.json" in problem


@pytest.mark.parametrize("change", [{"added_kv_proj_dim": None}, {"in_channels": 4}])
def test_other_models_with_features_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        tiny_with_features(**change)


@pytest.mark.parametrize(
    "task, images, message",
    [
        (
            "flf2v",
            ("first.png",),
            "ref_image_path and ref_last_image_path in every row, got 1 of 2",
        ),
        ("flf2v", (), "needs ref_image_path and ref_last_image_path in every row, got 1 of 2"),
        ("i2v", (), "needs ref_image_path in every row, got 1 of 2"),
        ("i2v", ("first.png", "last.png"), "got a last frame for 1 prompts"),
    ],
)
def test_rows_with_too_few_or_too_many_frames_are_refused(roots, task, images, message):
    rows = [request_of(task), Request("other", *(str(GOLDEN / name) for name in images))]
    config = config_of(roots[task], task)
    assert check_run(config, {"prompts_csv": rows[:1]}, [SIZE]) == {"text", "image"}
    with pytest.raises(ValueError, match=message):
        check_run(config, {"prompts_csv": rows}, [SIZE])


# --- LoRA -----------------------------------------------------------------------------------------


def trained_lora(model):
    """Return an adapter of all matrices of the blocks with random values."""
    add_trainable_lora(model, training_config(model, rank=3, alpha=6.0))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return current_lora(model)


@each_task
@pytest.mark.parametrize("form", ["diffusers", "original"])
def test_a_lora_covers_the_features_and_is_read_back(tmp_path, form, task):
    pictures = 2 if task == "flf2v" else 1
    model = tiny_with_features(**TWO if task == "flf2v" else {})
    install(model)
    twin = copy.deepcopy(model)
    lora = trained_lora(model)
    assert {"blocks.1.attn2.add_k_proj", "blocks.0.attn2.add_v_proj"} <= lora.keys()
    assert len(lora) == 2 * 12
    save_lora(lora, tmp_path, form=form)
    add_lora(twin, read_lora(tmp_path))
    arguments = with_features(pictures=pictures)
    with torch.no_grad():
        torch.testing.assert_close(twin(**arguments), model(**arguments), rtol=1e-4, atol=1e-5)


def test_a_model_without_features_takes_the_other_modules_of_the_lora(tmp_path):
    lora = trained_lora(tiny_with_features())
    with pytest.warns(UserWarning, match="4 modules .* left out"):
        fit_lora(tiny(), lora)
    assert len(lora) == 2 * 10 and not [name for name in lora if ".add_" in name]
