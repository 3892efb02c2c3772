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
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel

from hyvideo.rewards.clip_metrics import ClipScorer, PickScorer, frame_indices, is_hub_name
from hyvideo.rewards.rewards import make_scorer

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


@pytest.mark.parametrize("batch_size", [1, 2, 3])
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


def test_a_bilinear_resize_of_floats_changes_the_cosine_as_documented(folder):
    """flow_grpo's later clip_scorer resizes in this way; docs/rewards.md has the differences."""
    scorer, differences = ClipScorer(folder), []
    mean, std = (
        torch.tensor(getattr(scorer.image_processor, name)).view(3, 1, 1)
        for name in ("image_mean", "image_std")
    )
    for video, prompt in zip(CLIPS, PROMPTS):
        frames = video[frame_indices(len(video))].float() / 255
        size = [round(side * SIZE / min(frames.shape[2:])) for side in frames.shape[2:]]
        top, left = ((side - SIZE) // 2 for side in size)
        frames = F.interpolate(frames, size, mode="bilinear", antialias=True)[
            ..., top : top + SIZE, left : left + SIZE
        ]
        with torch.no_grad():
            pooled = scorer.model.vision_model(pixel_values=(frames - mean) / std).pooler_output
            cosine = (
                F.normalize(scorer.model.visual_projection(pooled), dim=-1) @ scorer._text(prompt)
            ).mean()
        differences.append(
            abs(cosine.item() - scorer.score([video], [prompt], fps=8)[0]["CLIP_cosine"])
        )
    assert differences == pytest.approx([0.013, 0.012, 0.004], abs=1e-3)


def test_the_small_model_distinguishes_videos_and_prompts(folder):
    """Otherwise the comparison of scores would be meaningless."""
    scores = ClipScorer(folder).score(
        [CLIPS[0], CLIPS[1], CLIPS[0]], [PROMPTS[0], PROMPTS[0], PROMPTS[1]], fps=8
    )
    values = [row["CLIP_cosine"] for row in scores]
    assert min(abs(values[0] - values[1]), abs(values[0] - values[2])) > 0.01


def test_clip_score_clamps_negative_cosines_per_frame(folder):
    scores = dict(
        zip(ClipScorer.dimensions, ClipScorer(folder).scaled(torch.tensor([0.4, -0.2])).tolist())
    )
    assert scores == pytest.approx({"CLIP_cosine": 0.1, "CLIPScore": 0.5, "CLIPScore_30": 1 / 3})


def test_sampled_frames_are_evenly_spaced():
    assert (
        frame_indices(8) == list(range(8))
        and frame_indices(3) == [0, 1, 2]
        and frame_indices(1) == [0]
    )
    assert frame_indices(9) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert frame_indices(81) == [0, 11, 23, 34, 46, 57, 69, 80]
    for count in range(9, 200):
        indices = frame_indices(count)
        gaps = np.diff(indices)
        assert (
            len(set(indices)) == 8
            and indices[0] == 0
            and indices[-1] == count - 1
            and np.ptp(gaps) <= 1
        )


def test_only_sampled_frames_affect_the_score(folder):
    scorer, video = ClipScorer(folder), CLIPS[0].clone()
    unseen = sorted(set(range(len(video))) - set(frame_indices(len(video))))
    before = scorer.score([video], PROMPTS[:1], fps=8)
    video[unseen] = 0
    assert scorer.score([video], PROMPTS[:1], fps=8) == before
    video[0] = 0
    assert scorer.score([video], PROMPTS[:1], fps=8) != before


def test_long_prompts_are_truncated_at_77_tokens(folder):
    scorer = ClipScorer(folder)
    long = "x" * 200
    first, other, shorter = scorer.score([CLIPS[0]] * 3, [long, long + " red", long[:40]], fps=8)
    assert len(scorer._tokens(long)) == 77 and first == other != shorter


def test_a_prompt_is_encoded_once(folder):
    scorer, lengths = PickScorer(folder), []
    scorer.model.text_model.register_forward_hook(
        lambda _, inputs, output: lengths.append(output.pooler_output.shape)
    )
    for _ in range(2):
        scorer.score([CLIPS[0]] * 5, [PROMPTS[0], PROMPTS[1]] * 2 + [PROMPTS[0]], fps=8)
    assert lengths == [(1, 32)] * 2


@pytest.mark.parametrize(
    "videos, prompts, message",
    [
        ([CLIPS[0].float()], ["a"], "uint8 tensor"),
        ([CLIPS[0][:0]], ["a"], "at least one frame"),
        ([CLIPS[0].permute(0, 2, 3, 1)], ["a"], r"\(frames, 3, height, width\)"),
        ([CLIPS[0]], [], "every video needs one prompt"),
        ([CLIPS[0]], ["a <|endoftext|> b"], "reserved text"),
    ],
)
def test_invalid_input_is_rejected(folder, videos, prompts, message):
    with pytest.raises(ValueError, match=message):
        ClipScorer(folder).score(videos, prompts, fps=8)


def test_check_prompts_rejects_reserved_text(folder):
    scorer = PickScorer(folder)
    scorer.check_prompts([*PROMPTS, "", "x" * 500])
    for token in ("<|startoftext|>", "<|endoftext|>"):
        with pytest.raises(
            ValueError, match="PickScore cannot score a prompt with the reserved text"
        ):
            scorer.check_prompts(["a cat", f"a {token} b"])
    scorer.check_prompts(["a <| b"])
    scorer.tokenizer = None
    scorer.check_prompts(PROMPTS)  # without tokenizing thousands of prompts
    scorer.tokenizer = PickScorer(folder).tokenizer
    assert scorer.held_out(CLIPS, PROMPTS) == {}


# --- files ---------------------------------------------------------------------------------------


def test_the_tokenizer_may_be_in_another_folder(copy, tmp_path, folder):
    expected = PickScorer(folder).score(CLIPS, PROMPTS, fps=8)
    beside = tmp_path / "CLIP-ViT-H-14-laion2B-s32B-b79K"
    beside.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (copy / name).rename(beside / name)
    assert PickScorer(copy).score(CLIPS, PROMPTS, fps=8) == expected
    with pytest.raises(ValueError, match="no tokenizer could be read from .*copy"):
        ClipScorer(copy)
    ClipScorer(copy, processor=beside)


def test_the_registry_creates_both_scorers(copy, tmp_path):
    for name, place in (
        ("clip", "clip/clip-vit-large-patch14"),
        ("pickscore", "clip/PickScore_v1"),
    ):
        shutil.copytree(copy, tmp_path / place)
        assert make_scorer(name, tmp_path, batch_size=2).batch_size == 2
        assert make_scorer(name, "nowhere", path=copy).label.lower().startswith(name)


def test_hub_names_are_distinguished_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts" / "clip").mkdir(parents=True)
    assert is_hub_name("openai/clip-vit-large-patch14")
    assert not any(
        map(is_hub_name, ["ckpts/clip", "/a/b", "./a/b", "a/b/c", "clip", tmp_path / "a"])
    )


def drop_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def rename_model(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "siglip"}))


def extend_vocabulary(folder):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"more": len(vocabulary)}))


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_a_tensor, "lacks tensor visual_projection.weight"),
        (truncate, "no CLIP model could be read from .*copy"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "no CLIP model could be read from .*copy",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            "no CLIP model could be read from .*copy",
        ),
        (rename_model, "model_type is 'siglip'"),
        (lambda folder: (folder / "merges.txt").unlink(), "no tokenizer could be read from .*copy"),
        (extend_vocabulary, "they belong to different models"),
    ],
)
def test_unusable_files_raise_an_error_that_names_them(copy, change, message):
    change(copy)
    with pytest.raises(ValueError, match=message):
        ClipScorer(copy)


def test_batch_size_zero_is_rejected(folder):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ClipScorer(folder, batch_size=0)
