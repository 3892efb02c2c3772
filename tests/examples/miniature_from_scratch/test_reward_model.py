"""Tests of the miniature's reward model: trained, written in the released layout, and loaded by
VideoAlignScorer.
"""

import pytest
import torch

from examples.miniature_from_scratch import reward_model
from examples.miniature_from_scratch.web_data import corruption_strengths
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.measures import measure
from hyvideo.miniature.reward import LearnedMiniatureScorer
from hyvideo.rewards.videoalign import VideoAlignScorer


def rendered(count=12):
    labels = world.LABELS[:count]
    videos = to_uint8(world.render(labels, generator(0, "rendered"))).transpose(1, 2).contiguous()
    return videos, labels


@pytest.mark.slow
def test_short_training_lowers_the_error_and_writes_the_released_layout(tmp_path):
    videos, labels = rendered()
    reward_model.train(tmp_path, (videos, labels), num_steps=20, batch_size=6, seed=0)
    folder = tmp_path / reward_model.FOLDER
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "model_config.json",
        "checkpoint-1/model.pth",
        "checkpoint-1/tokenizer/tokenizer_config.json",
    } <= names
    prompts = [world.caption(label) for label in labels]
    scorer = VideoAlignScorer(folder, precision="fp32_math")
    scores = scorer.score(list(videos), prompts, fps=world.FPS)
    given = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in scores])
    truth = measure(videos, labels).scores
    untrained = tmp_path / "untrained"
    reward_model.write_untrained(untrained, 0)
    before = VideoAlignScorer(untrained, precision="fp32_math").score(
        list(videos), prompts, fps=world.FPS
    )
    first = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in before])
    assert ((given - truth) ** 2).mean() < 0.5 * ((first - truth) ** 2).mean()

    local = LearnedMiniatureScorer(tmp_path)
    assert local.score(list(videos), prompts, fps=world.FPS) == scorer.score(
        list(videos), prompts, fps=world.FPS
    )
    held_out = local.held_out_each(list(videos), prompts)
    assert [row["true/VQ"] for row in held_out] == pytest.approx(truth[:, 0].tolist(), abs=1e-5)
    assert {row["all_correct"] for row in held_out} <= {0.0, 1.0}


def test_the_shipped_reward_model_predicts_the_true_scores():
    """Correlation on clean and defective videos, half with wrong captions; 0.99 when the model was
    built.
    """
    rng = generator(1, "unseen")
    labels = world.LABELS.repeat(3, 1)
    videos = to_uint8(world.render(labels, rng, corruption_strengths(len(labels), rng))).transpose(
        1, 2
    )
    captioned = labels.clone()
    captioned[::2] = labels[torch.from_numpy(rng.permutation(len(labels)))][::2]
    prompts = [world.caption(label) for label in captioned]
    scores = LearnedMiniatureScorer("assets/miniature").score(
        list(videos.contiguous()), prompts, fps=world.FPS
    )
    given = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in scores])
    truth = measure(videos, captioned).scores
    for dimension in range(3):
        assert torch.corrcoef(torch.stack([given[:, dimension], truth[:, dimension]]))[0, 1] > 0.95
