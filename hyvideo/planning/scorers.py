"""Memory and time of the scorers that a run loads."""

from hyvideo.settings.reward_settings import reward_options
from hyvideo.settings.sections import RewardSettings

# Bytes of weights. VideoAlign is Qwen2-VL-2B and HPSv3 Qwen2-VL-7B, both without the output layer;
# CLIP's ViT-L and PickScore's ViT-H are in float32.
_QWEN2_VL = {
    "videoalign": {"bf16": 4.57e9, "fp32_math": 9.2e9},
    "hpsv3": {"bf16": 15.49e9, "fp32_math": 30.98e9},
}
_CLIP = {"clip": 0.43e9 * 4, "pickscore": 0.99e9 * 4}
# activations, estimated at 1 to 1.5 GiB; those of the other scorers are not counted
ACTIVATIONS = 1.5 * 2**30
# FLOPs, counted by torch, for frames that are resized to about the same size. HPSv3 for each frame:
# 1.29e12 of vision, and 10.7e12 of the language model for 804 tokens. VideoAlign for each frame that
# it samples, 2 a second: 0.73e12 of vision, and 0.34e12 for 126 tokens; and for its question of about
# 900 tokens. The other scorers need less than a hundredth of what a rollout does.
HPSV3_FRAME = 12.0e12
HPSV3_FRAMES = 8  # the default of its option num_frames
VIDEOALIGN_FRAME = 1.07e12
VIDEOALIGN_QUESTION = 2.5e12
VIDEOALIGN_FPS = 2.0


def scorer_bytes(reward: RewardSettings, names: list[str]) -> float:
    """Return the bytes of the weights of scorers, 0 of those without weights on this machine and of
    a user's.
    """
    options = reward_options(reward)
    total = 0.0
    for name in names:
        if name in _QWEN2_VL:
            total += _QWEN2_VL[name][options[name].get("precision") or "bf16"]
        total += _CLIP.get(name, 0.0)
    return total


def scoring_bytes(names: list[str]) -> float:
    """Return the bytes that scorers need beside their weights while they score."""
    return ACTIVATIONS if _QWEN2_VL.keys() & set(names) else 0.0


def scoring_flops(reward: RewardSettings, names: list[str], num_frames: int, fps: float) -> float:
    """Return the FLOPs of scoring a video of ``num_frames`` on this machine, in bf16."""
    flops = 0.0
    if "hpsv3" in names:
        chosen = reward_options(reward)["hpsv3"].get("num_frames", HPSV3_FRAMES)
        flops += HPSV3_FRAME * min(chosen or num_frames, num_frames)
    if "videoalign" in names:
        sampled = max(2.0, num_frames / fps * VIDEOALIGN_FPS)
        flops += VIDEOALIGN_FRAME * sampled + VIDEOALIGN_QUESTION
    return flops
