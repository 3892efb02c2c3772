"""Tests of HPSv3 against the released program (hpsv3 1.0.0 on transformers 4.45.2), which scored
four pictures with a small random model in the released layout.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLConfig

from hyvideo.rewards.hpsv3 import HPSv3Scorer
from hyvideo.rewards.hpsv3 import scorer as scorer_module
from hyvideo.rewards.hpsv3.scorer import PIXELS, TEMPLATE, estimates, read_weights
from hyvideo.rewards.qwen2_vl.model import RewardModel
from hyvideo.rewards.qwen2_vl.preprocessing import resize, resize_by_pillow

GOLDEN = Path(__file__).parents[2] / "golden" / "hpsv3"
golden = json.loads((GOLDEN / "golden.json").read_text())
PROMPTS = golden["prompts"]
FLOAT = 2e-5  # tolerance of the two outputs in float32


def load(root=GOLDEN, **options):
    return HPSv3Scorer(root, base=GOLDEN / "base", **options)


def pictures():
    """Return the pictures as videos of one frame. Shape of each: uint8 (1, 3, height, width)."""
    files = [Image.open(GOLDEN / name).convert("RGB") for name in golden["images"]]
    return [torch.from_numpy(np.array(file)).permute(2, 0, 1)[None] for file in files]


@torch.no_grad()
def outputs(scorer):
    """Return mu and log sigma of each picture. Shape: (pictures, 2)."""
    rows = []
    for picture, prompt in zip(pictures(), PROMPTS):
        states = scorer.model.reward_states(**scorer.prepare(picture, prompt))
        rows.append(scorer.model.head(states)[0, 0])
    return torch.stack(rows)


def difference(found, name):
    return (found - torch.tensor(golden[name])).abs().amax(0).tolist()


@pytest.fixture(scope="module")
def exact():
    return load(dtype=torch.float32)


def video_of(num_frames):
    """Return frames that all differ. Shape: uint8 (frames, 3, 96, 160)."""
    frame = pictures()[0][0]
    return torch.stack(
        [frame.roll(11 * number, -1) // (1 + number % 3) for number in range(num_frames)]
    )


# --- against the released program --------------------------------------------------------------


def test_float32_outputs_match_the_original(exact):
    found = outputs(exact)
    for mistake in ("wrong_with_mrope", "wrong_with_stripped_template"):
        assert difference(torch.tensor(golden["fp32"]), mistake)[0] > 0.3
    assert max(difference(found, "fp32")) <= FLOAT


def test_float32_arithmetic_gives_the_center_of_the_bf16_outputs():
    found = outputs(load(precision="fp32_math"))
    assert max(difference(found, "fp32_arithmetic_bf16_rotary")) <= FLOAT


def test_bf16_outputs_match_the_original_within_its_noise():
    mu, log_sigma = difference(outputs(load()), "bf16")
    assert mu <= 0.1 and log_sigma <= 0.2


def sha(array):
    return hashlib.sha256(array.contiguous().numpy().tobytes()).hexdigest()


def test_tokens_resized_frames_and_patches_equal_the_original_bit_for_bit(exact):
    assert hashlib.sha256(TEMPLATE.read_bytes()).hexdigest() == golden["template_sha256"]
    for number, (picture, prompt) in enumerate(zip(pictures(), PROMPTS)):
        resized = resize_by_pillow(picture, max_pixels=PIXELS, min_pixels=PIXELS)
        inputs = exact.prepare(picture, prompt)
        assert inputs["input_ids"].tolist() == [golden["input_ids"][number]]
        assert sha(resized[0].permute(1, 2, 0)) == golden["resized_sha256"][number]
        assert sha(inputs["pixel_values"]) == golden["pixel_values_sha256"][number]
        assert not torch.equal(resized, resize(picture, max_pixels=PIXELS, min_pixels=PIXELS))


def test_the_released_file_has_every_tensor_of_the_full_size():
    """All 736 names and shapes of the released file fit the model of 7 billion parameters."""
    released = json.loads((GOLDEN / "released_checkpoint_keys_shapes.json").read_text())
    stored = {name: torch.empty(shape, device="meta") for name, shape in released.items()}
    assert len(stored) == 736
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer_module, "read_safetensors", lambda *_: (stored, {}))
        tensors, head = read_weights(Path("HPSv3.safetensors"))
    config = json.loads((GOLDEN / "qwen2_vl_7b.json").read_text())
    model = RewardModel(
        "HPSv3",
        Qwen2VLConfig.from_dict(config),
        tensors,
        head,
        reward_token_ids=[151657],
        dtype=torch.bfloat16,
        rope_dtype=torch.bfloat16,
        device="meta",
    )
    unused = stored["lm_head.weight"].numel()
    loaded = sum(parameter.numel() for parameter in model.parameters())
    assert loaded == sum(tensor.numel() for tensor in stored.values()) - unused
    assert {parameter.dtype for parameter in model.head.parameters()} == {torch.float32}


# --- videos ------------------------------------------------------------------------------------


def test_a_video_has_the_mean_of_its_frames_and_of_the_best_30_percent():
    means = torch.tensor([5.0, 1, 9, 3, 8, 2, 7, 0, 6, 4])
    assert [value.item() for value in estimates(means)] == [4.5, 8.0]
    assert [value.item() for value in estimates(means[:3])] == [5.0, 9.0]


@pytest.mark.parametrize("num_frames, chosen", [(4, [0, 3, 6, 9]), (0, list(range(10)))])
def test_scores_are_those_of_the_chosen_frames_in_any_batch(exact, monkeypatch, num_frames, chosen):
    monkeypatch.setattr(exact, "num_frames", num_frames)
    monkeypatch.setattr(exact, "batch_size", 3)
    video = video_of(10)
    with torch.no_grad():
        means = torch.cat([exact.frame_scores(frame[None], PROMPTS[0]) for frame in video[chosen]])
    assert len(means.unique()) == len(chosen)
    best = means.sort(descending=True).values[: max(1, 3 * len(chosen) // 10)]
    (row, other) = exact.score([video, video.flip(0)], [PROMPTS[0], PROMPTS[1]], fps=16.0)
    assert row["HPSv3"] == pytest.approx(means.mean().item(), abs=FLOAT)
    assert row["HPSv3_top30"] == pytest.approx(best.mean().item(), abs=FLOAT)
    assert abs(other["HPSv3"] - row["HPSv3"]) > 100 * FLOAT  # of another prompt


def test_the_gradient_reaches_the_chosen_frames_and_only_the_best_ones(exact, monkeypatch):
    monkeypatch.setattr(exact, "num_frames", 4)
    video = video_of(10)
    levels = video[None].float().requires_grad_()
    scores = exact.score_with_gradient(levels, PROMPTS[:1], fps=16.0)
    (row,) = exact.score([video], PROMPTS[:1], fps=16.0)
    assert scores.tolist() == [list(row.values())]
    reached = []
    for column in range(2):
        (gradient,) = torch.autograd.grad(scores[0, column], levels, retain_graph=True)
        reached.append(gradient[0].flatten(1).norm(dim=1).nonzero()[:, 0].tolist())
    assert reached[0] == [0, 3, 6, 9]
    assert len(reached[1]) == 1 and reached[1][0] in reached[0]


# --- files -------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """Copy the checkpoint and the tokenizer into one folder, as the download does."""
    folder = shutil.copytree(GOLDEN / "base", tmp_path / "HPSv3")
    shutil.copyfile(GOLDEN / "HPSv3.safetensors", folder / "HPSv3.safetensors")
    return folder


def rewrite(folder, change):
    path = folder / "HPSv3.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_the_output_layer_does_not_replace_the_embedding(copy, exact):
    """VideoAlign's files tie the two; here that moves mu by 4.6."""

    def negate(tensors):
        assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = -tensors["lm_head.weight"]

    rewrite(copy, negate)
    found = HPSv3Scorer(copy, dtype=torch.float32)
    assert torch.equal(outputs(found), outputs(exact))


def without_layer(tensors):
    del tensors["rm_head.3.bias"]


def with_one_output(tensors):
    tensors["rm_head.5.weight"] = tensors["rm_head.5.weight"][:1].clone()


def without_norm(tensors):
    del tensors["model.norm.weight"]


def without_reward_token(tensors):
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()


@pytest.mark.parametrize(
    "change, message",
    [
        (without_layer, "rm_head"),
        (with_one_output, "rm_head"),
        (without_norm, "norm.weight' is missing"),
        (without_reward_token, "398.*got 399"),
    ],
)
def test_files_of_another_model_are_refused(copy, change, message):
    """A cut file, another reward model of Qwen2-VL, and the tokenizer of another model."""
    rewrite(copy, change)
    with pytest.raises(ValueError, match=f"(?s)HPSv3.*{message}"):
        HPSv3Scorer(copy)


def test_a_folder_without_the_base_models_config_is_named(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json"):
        HPSv3Scorer(copy)
