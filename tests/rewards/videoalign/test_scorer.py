"""Tests of scores against the original program, on a small random model in the released layout."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hyvideo.data.videos import read_video
from hyvideo.rewards.qwen2_vl.model import RewardModel, plain_name
from hyvideo.rewards.videoalign import VideoAlignScorer
from hyvideo.rewards.videoalign import checkpoint as checkpoints
from hyvideo.rewards.videoalign.checkpoint import find_checkpoint, read_weights

GOLDEN = Path(__file__).parents[2] / "golden" / "videoalign"
golden = json.loads((GOLDEN / "golden.json").read_text())
center = json.loads((GOLDEN / "bf16_reference_fp32maths.json").read_text())
VIDEOS = [GOLDEN / "videos" / name for name in golden["videos"]]
PROMPTS = golden["prompts"]
FLOAT = 2e-5  # tolerance of raw scores


def load(root="VideoReward", **options):
    return VideoAlignScorer(GOLDEN / root, base=GOLDEN / "base", **options)


@pytest.fixture(scope="module")
def exact():
    return load(dtype=torch.float32)


@pytest.fixture(scope="module")
def first_scores(exact):
    """The scores of the first video alone."""
    return exact.score_files(VIDEOS[:1], PROMPTS[:1])


def difference(scores, expected):
    assert len(scores) == len(expected)
    return max(
        abs(a[name] - b[name])
        for a, b in zip(scores, expected)
        for name in ("VQ", "MQ", "TA", "Overall")
    )


# --- against the original program --------------------------------------------------------------


@pytest.mark.parametrize(
    "min_pixels, size", [(None, (280, 392)), (4704, (56, 84)), (4 * 4704, (112, 168))]
)
def test_frames_are_enlarged_to_the_number_of_pixels_in_the_checkpoint(
    exact, monkeypatch, min_pixels, size
):
    """Without min_frame_pixels in the checkpoint, frames have at least 128 * 28 * 28 pixels."""
    if min_pixels:
        monkeypatch.setattr(
            exact, "settings", dataclasses.replace(exact.settings, min_pixels=min_pixels)
        )
    video = torch.zeros(4, 3, 56, 84, dtype=torch.uint8)
    assert exact.sample_frames(video, 2.0).shape[-2:] == size


def test_batches_are_padded_on_the_right_like_the_original(exact):
    clips, rates = zip(*map(read_video, VIDEOS))
    batch = exact.prepare(list(clips), PROMPTS, list(rates))
    arrays = np.load(GOLDEN / "intermediates.npz")
    assert torch.equal(batch["input_ids"], torch.from_numpy(arrays["batch_input_ids"]).long())
    assert torch.equal(
        batch["attention_mask"], torch.from_numpy(arrays["batch_attention_mask"]).long()
    )


@pytest.mark.parametrize(
    "batch_size, run",
    [pytest.param(1, "single", marks=pytest.mark.slow), (3, "batch")],
)
def test_float32_scores_match_the_original(exact, batch_size, run):
    exact.batch_size = batch_size
    scores = exact.score_files(VIDEOS, PROMPTS)
    assert difference(scores, golden["fp32"][f"{run}_norm"]) <= FLOAT


@pytest.mark.system
@pytest.mark.parametrize(
    "change, run",
    [({"fps": 4.0}, "fps4_raw_a"), ({"num_frames": 8}, "nframes8_raw_a")],
    ids=["fps", "num_frames"],
)
def test_other_frame_samplings_match_the_original(change, run):
    scorer = load(dtype=torch.float32)
    scorer.settings = dataclasses.replace(scorer.settings, **change)
    assert (
        difference(
            scorer.score_files(VIDEOS[:1], PROMPTS[:1], normalize=False), golden["fp32"][run]
        )
        <= FLOAT
    )


def test_a_smaller_frame_area_matches_the_original():
    scorer = load(dtype=torch.float32)
    scorer.settings = dataclasses.replace(scorer.settings, max_pixels=120000)
    scores = scorer.score_files(VIDEOS[2:], PROMPTS[2:], normalize=False)
    assert difference(scores, golden["fp32"]["max_pixels_120000_raw_c"]) <= FLOAT


@pytest.mark.parametrize(
    "options", [{"merge_lora": True}, {"root": "VideoReward_adapter"}], ids=["merged", "adapter"]
)
def test_merged_lora_and_the_adapter_layout_give_the_same_scores(options):
    scores = load(dtype=torch.float32, **options).score_files(
        VIDEOS[:1], PROMPTS[:1], normalize=False
    )
    assert difference(scores, golden["fp32"]["single_raw"][:1]) <= FLOAT


@pytest.mark.system
@pytest.mark.parametrize(
    "batch_size, run",
    [pytest.param(1, "single_raw", marks=pytest.mark.slow), (3, "batch_raw")],
)
def test_bf16_scores_match_the_original_within_its_noise(batch_size, run):
    scores = load(batch_size=batch_size).score_files(VIDEOS, PROMPTS, normalize=False)
    # bf16 changes the original's own scores by this; CPUs differ by up to a tenth of it
    noise = difference(golden["bf16"][run], golden["fp32"][run])
    assert difference(scores, golden["bf16"][run]) <= noise / 10


@pytest.mark.slow
def test_float32_arithmetic_gives_the_center_of_the_bf16_scores():
    scorer = load(precision="fp32_math")
    assert (
        difference(scorer.score_files(VIDEOS, PROMPTS, normalize=False), center["single_raw"])
        <= FLOAT
    )


# --- videos in memory ----------------------------------------------------------------------------


def test_a_video_in_memory_scores_like_its_file(exact):
    video, fps = read_video(VIDEOS[1])
    (from_file,) = exact.score_files(VIDEOS[1:2], PROMPTS[1:2])
    (in_memory,) = exact.score([video], PROMPTS[1:2], fps=fps)
    assert in_memory == from_file


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """Copy the released layout and its base model into a folder that a test may corrupt."""
    shutil.copytree(GOLDEN / "base", tmp_path / "base")
    return shutil.copytree(GOLDEN / "VideoReward", tmp_path / "VideoReward")


def rewrite(root, change):
    path = root / "checkpoint-11352" / "model.pth"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("base_model.model.visual.merger.ln_q.weight"),
            "'visual.merger.ln_q.weight' is missing",
        ),
        (
            lambda t: t.update({"base_model.model.model.norm.weight": torch.zeros(3)}),
            r"norm.weight' has shape \(3,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, change, message):
    rewrite(copy, change)
    with pytest.raises(ValueError, match=message):
        VideoAlignScorer(copy)


def to_int8(tensors):
    tensors |= {name: tensor.to(torch.int8) for name, tensor in tensors.items()}


def second_spelling(tensors):
    name = "base_model.model.model.norm.weight"
    tensors["base_model.model.model.language_model.norm.weight"] = tensors[name] + 1


def three_rows(tensors):
    tensors["base_model.model.rm_head.weight"] = tensors["base_model.model.rm_head.weight"].repeat(
        3, 1
    )


@pytest.mark.parametrize(
    "change, message",
    [(to_int8, "int8"), (second_spelling, "values differ"), (three_rows, "rm_head.weight.*3")],
)
def test_tensors_with_another_meaning_are_refused(copy, change, message):
    """int8 as bitsandbytes stores it, files of two versions of transformers, a head of three rows."""
    rewrite(copy, change)
    with pytest.raises(ValueError, match=message):
        VideoAlignScorer(copy)


def test_names_of_wrappers_are_removed(copy, first_scores):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"module._orig_mod.{name}"] = tensors.pop(name)

    rewrite(copy, wrap)
    scorer = VideoAlignScorer(copy, dtype=torch.float32)
    assert difference(scorer.score_files(VIDEOS[:1], PROMPTS[:1]), first_scores) == 0


def without_lora(tensors):
    for name in [name for name in tensors if ".lora_" in name]:
        del tensors[name]


def set_lora(root, settings):
    path = root / "model_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_lora_config": settings}))


def test_a_fully_trained_checkpoint_without_lora_loads(copy, first_scores):
    """With the LoRA merged into its weights, the model is the same."""
    state = load(dtype=torch.float32, merge_lora=True).model.model.state_dict()
    merged = {plain_name(name): tensor for name, tensor in state.items()}

    def put_merged(tensors):
        without_lora(tensors)
        for name in tensors:
            if plain_name(name) in merged:
                tensors[name] = merged[plain_name(name)][: len(tensors[name])]

    embedding = torch.load(copy / "checkpoint-11352" / "model.pth", weights_only=True)[
        "base_model.model.lm_head.weight"
    ]
    merged["language_model.embed_tokens.weight"] = embedding
    rewrite(copy, put_merged)
    set_lora(copy, {"lora_enable": False})
    scorer = VideoAlignScorer(copy, dtype=torch.float32, merge_lora=True)
    assert difference(scorer.score_files(VIDEOS[:1], PROMPTS[:1]), first_scores) <= FLOAT


def test_missing_parts_are_named(copy, tmp_path):
    with pytest.raises(ValueError, match="model_config.json"):
        VideoAlignScorer(tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match="base"):
        VideoAlignScorer(copy)


def test_the_released_file_fits_the_bundled_base_model_config(monkeypatch, tmp_path):
    """All 1,123 names and shapes of the released file fit a model on the meta device."""
    from transformers import Qwen2VLConfig

    released = json.loads((GOLDEN / "released_checkpoint_keys_shapes.json").read_text())
    tensors = {name: torch.empty(shape, device="meta") for name, shape in released.items()}
    assert len(tensors) == 1123
    config = json.loads((GOLDEN / "VideoReward" / "model_config.json").read_text())
    config["model_config"]["model_name_or_path"] = "Qwen/Qwen2-VL-2B-Instruct"
    config["peft_lora_config"] |= {"lora_r": 64, "lora_alpha": 128}
    (tmp_path / "checkpoint-11352").mkdir()
    (tmp_path / "checkpoint-11352" / "model.pth").touch()
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoints, "read_pickle", lambda *_, **__: tensors)
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    found = find_checkpoint(tmp_path)
    assert found.base is None and found.settings.lora.scale == 2.0
    weights = read_weights(found)
    assert sum(".lora_" in name for name in weights.model) == 2 * 7 * 28
    base = Qwen2VLConfig.from_dict(found.config)
    base.text_config.vocab_size = 151660
    model = RewardModel(
        "VideoAlign",
        base,
        weights.model,
        torch.nn.Linear(1536, 1, bias=False),
        reward_token_ids=[151657, 151658, 151659],
        dtype=torch.bfloat16,
        rope_dtype=torch.bfloat16,
        device="meta",
        lora=found.settings.lora,
    )
    assert sum(p.numel() for p in model.parameters()) == sum(
        t.numel() for name, t in tensors.items() if "lm_head" not in name
    )
