"""The miniature's own reward model: the released layout, built end to end, and read by the real scorer."""

import torch

from hyvideo.distributed.randomness import generator
from hyvideo.miniature import reward_model, world
from hyvideo.miniature.reward import LearnedMiniatureScorer
from hyvideo.models.reward_models.videoalign import VideoAlignScorer
from hyvideo.video_io import to_uint8


def rendered(count=12):
    labels = world.LABELS[:count]
    videos = to_uint8(world.render(labels, generator(0, "rendered"))).transpose(1, 2).contiguous()
    return videos, labels


def test_a_short_training_lowers_the_error_and_leaves_the_released_layout(tmp_path):
    videos, labels = rendered()
    reward_model.train(tmp_path, (videos, labels), num_steps=30, batch_size=8, seed=0)
    folder = tmp_path / reward_model.FOLDER
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"model_config.json", "checkpoint-1/model.pth", "checkpoint-1/tokenizer/tokenizer_config.json"} <= names
    prompts = [world.caption(label) for label in labels]
    scorer = VideoAlignScorer(folder, precision="fp32_math")
    scores = scorer.score(list(videos), prompts, fps=world.FPS)
    given = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in scores])
    truth = reward_model.true_scores(videos, labels)
    untrained = tmp_path / "untrained"
    reward_model.write_untrained(untrained, 0)
    before = VideoAlignScorer(untrained, precision="fp32_math").score(list(videos), prompts, fps=world.FPS)
    first = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in before])
    assert ((given - truth) ** 2).mean() < 0.5 * ((first - truth) ** 2).mean()

    local = LearnedMiniatureScorer(tmp_path)
    assert local.score(list(videos), prompts, fps=world.FPS) == scorer.score(list(videos), prompts, fps=world.FPS)
    held_out = local.held_out(list(videos), prompts)
    assert abs(held_out["true/VQ"] - truth[:, 0].mean().item()) < 1e-5
    assert "all_correct" in held_out


def test_the_shipped_reward_model_knows_the_truth():
    """Of clips with and without defects under captions of which half lie: 0.99 when it was made."""
    rng = generator(1, "unseen")
    labels = world.LABELS.repeat(3, 1)
    videos = to_uint8(world.render(labels, rng, world.corruption_strengths(len(labels), rng))).transpose(1, 2)
    told = labels.clone()
    told[::2] = labels[torch.from_numpy(rng.permutation(len(labels)))][::2]
    prompts = [world.caption(label) for label in told]
    scores = LearnedMiniatureScorer("assets/miniature").score(list(videos.contiguous()), prompts, fps=world.FPS)
    given = torch.tensor([[score[name] for name in ("VQ", "MQ", "TA")] for score in scores])
    truth = reward_model.true_scores(videos, told)
    for dimension in range(3):
        assert torch.corrcoef(torch.stack([given[:, dimension], truth[:, dimension]]))[0, 1] > 0.95
