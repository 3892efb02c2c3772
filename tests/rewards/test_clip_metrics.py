"""Tests of CLIPScore and PickScore with a small random CLIP, against transformers' processor and
forward pass.
"""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from hyvideo.rewards.clip_metrics import ClipScorer, PickScorer

SIZE = 32
PROMPTS = ["a red circle moves right", "Snow on a green hill, 35mm.", "the cat"]


def write_tokenizer(folder):
    """Write a CLIP tokenizer with a byte alphabet and a few merges, as vocab.json and
    merges.txt.
    """
    letters = sorted(ByteLevel.alphabet())
    merges = [("r", "e"), ("re", "d</w>"), ("t", "h"), ("th", "e</w>")]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *(a + b for a, b in merges)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return len(words)


def write_clip(folder):
    from transformers import CLIPConfig, CLIPModel

    vocab_size = write_tokenizer(folder)
    layers = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = layers | {
        "vocab_size": vocab_size,
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
    }
    vision = layers | {"image_size": SIZE, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    # with transformers' initialization all cosines are nearly equal
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn_like(parameter) / math.sqrt(parameter[0].numel())
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "tiny"
    write_clip(folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    """Copy the model into a folder that a test may corrupt."""
    return shutil.copytree(folder, tmp_path / "copy")


def clip(seed, frames=12, height=40, width=72):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (frames, 3, height // 8, width // 8), dtype=np.uint8)
    return torch.from_numpy(coarse.repeat(8, axis=2).repeat(8, axis=3))


CLIPS = [clip(0), clip(1, frames=9, height=64, width=48), clip(2, frames=5)]


def plain_cosines(folder, video, prompt):
    """Compute the cosines as in transformers' documentation."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder).eval()
    chosen = video[np.linspace(0, len(video) - 1, 8).round()] if len(video) > 8 else video
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    tokens = CLIPTokenizer.from_pretrained(folder)(
        [prompt], padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        output = model(**tokens, **processor(list(chosen.numpy()), return_tensors="pt"))
    return output.logits_per_image[:, 0] / model.logit_scale.exp(), model.logit_scale.exp().item()


def test_scores_in_a_batch_of_videos_of_any_lengths_are_those_of_each_video_alone(folder):
    """The short video may come first: its frames must not be filled up with those of the
    next one.
    """
    scorer = ClipScorer(folder, batch_size=3)
    alone = [scorer.score([video], [prompt], fps=8)[0] for video, prompt in zip(CLIPS, PROMPTS)]
    for order in itertools.permutations(range(3)):
        together = scorer.score([CLIPS[i] for i in order], [PROMPTS[i] for i in order], fps=8)
        for place, number in enumerate(order):
            assert together[place] == pytest.approx(alone[number], abs=2e-6), order


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_match_transformers(folder, batch_size):
    options = {"batch_size": batch_size}
    clip_scores = ClipScorer(folder, **options).score(CLIPS, PROMPTS, fps=8)
    pick_scores = PickScorer(folder, **options).score(CLIPS, PROMPTS, fps=8)
    for video, prompt, by_clip, by_pick in zip(CLIPS, PROMPTS, clip_scores, pick_scores):
        cosines, scale = plain_cosines(folder, video, prompt)
        mean = cosines.mean().item()
        assert by_clip == pytest.approx(
            {
                "CLIP_cosine": mean,
                "CLIPScore": 2.5 * cosines.clamp(min=0).mean().item(),
                "CLIPScore_30": 100 * mean / 30,
            },
            abs=2e-6,
        )
        assert by_pick == pytest.approx(
            {"Pick_cosine": mean, "PickScore": scale * mean / 26}, abs=2e-6
        )


def test_clip_score_clamps_negative_cosines_per_frame(folder):
    scores = dict(
        zip(ClipScorer.dimensions, ClipScorer(folder).scaled(torch.tensor([0.4, -0.2])).tolist())
    )
    assert scores == pytest.approx({"CLIP_cosine": 0.1, "CLIPScore": 0.5, "CLIPScore_30": 1 / 3})


def test_long_prompts_are_truncated_at_77_tokens(folder):
    scorer = ClipScorer(folder)
    long = "x" * 200
    first, other, shorter = scorer.score([CLIPS[0]] * 3, [long, long + " red", long[:40]], fps=8)
    assert len(scorer._tokens(long)) == 77 and first == other != shorter


# --- files ---------------------------------------------------------------------------------------


def test_the_tokenizer_may_be_in_another_folder(copy, tmp_path, folder):
    expected = PickScorer(folder).score(CLIPS, PROMPTS, fps=8)
    beside = tmp_path / "CLIP-ViT-H-14-laion2B-s32B-b79K"
    beside.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (copy / name).rename(beside / name)
    assert PickScorer(copy).score(CLIPS, PROMPTS, fps=8) == expected
    with pytest.raises(ValueError, match="copy"):
        ClipScorer(copy)
    ClipScorer(copy, processor=beside)


def drop_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_a_tensor, "visual_projection.weight"),
        (lambda folder: (folder / "merges.txt").unlink(), "no tokenizer could be read from .*copy"),
    ],
)
def test_unusable_files_raise_an_error_that_names_them(copy, change, message):
    change(copy)
    with pytest.raises(ValueError, match=message):
        ClipScorer(copy)
