"""Settings of a small run in which values that a fault could confuse are never equal.

Group and iteration, row and its place in a pass, update and iteration, training and validation,
file and settings: a test cannot tell two of them apart where they are one number.
"""

import pytest

from hyvideo.settings.config import Config
from tests.shallow import SHALLOW

PROMPTS = [
    "a red circle moves up",
    "a blue square moves down slowly",
    "circle",
    "a yellow circle moves left, then right",
    "two red squares",
    "a blue circle moves right and a red square moves down",
    "a square",
    "a green circle moves up, up and away",
    "red",
    "a circle beside a square",
    "a red square moves left",
]
VALIDATION_PROMPTS = [*PROMPTS[1:4], "a green square moves up", "a blue triangle"]
WEIGHTS = '{"VQ": 0.5, "MQ": 2}'  # of two of three dimensions
DISTINCT = {
    "pretrained_model_root": SHALLOW,
    "batch_size": 12,
    "gradient_accumulation_steps": 2,
    "num_generations": 3,
    "num_updates_per_rollout": 4,
    "mini_batch_size_per_update": 5,
    "decode_batch_size": 7,
    "reward_weights": WEIGHTS,
    "seed": 17,
    "validation_seed": 23,
    # files of training videos are enlarged versions of 16 x 24 pixels
    "sample_n_frames": 5,
    "validation_num_frames": 9,
    "height": 16,
    "width": 24,
    "validation_height": 32,
    "validation_width": 8,
    "grpo_sampling_steps": 4,
    "validation_steps": 3,
    "shift": 3.0,
    "validation_shift": 4.0,
    "cfg_scale": 2.0,
    "validation_cfg_scale": 2.5,
    "guidance_interval": "0.2:0.95",
    "eta": 0.7,
    "fps": 8,
    "validation_repeats": 2,
    "validation_batch_size": 3,
    "learning_rate": 1e-3,
    "lora_alpha": 6.0,
}
FILE_FPS = 12  # of video files in these tests


def counts(config: Config) -> dict[str, int]:
    """Return the numbers of rows, prompts and updates that an index may count."""
    rollout = config.rollout
    rollouts = rollout.batch_size * rollout.gradient_accumulation_steps
    return {
        "rollouts": rollouts,
        "groups": rollouts // rollout.num_generations,
        "members": rollout.num_generations,
        "batch": rollout.batch_size,
        "batches": rollout.gradient_accumulation_steps,
        "updates": config.objective.updates,
        "rows of an update": rollouts // config.objective.updates,
        "rows of a pass": config.rows_per_pass,
        "decoded together": rollout.decode_batch_size,
        "prompts": len(PROMPTS),
        "videos of the validation": len(VALIDATION_PROMPTS) * config.validation.validation_repeats,
    }


def must_differ(config: Config) -> list[list[object]]:
    """Return values that a program has for several purposes."""
    training, validation = config.sampling, config.validation_sampling
    pairs = [
        [getattr(each, name) for each in (training, validation)]
        for name in ("frames", "height", "width", "steps", "shift", "guidance_scale")
    ]
    return [
        *pairs,
        [training.height, training.width],
        [config.data.seed, config.validation.validation_seed],
        [config.data.fps, FILE_FPS],
        list(counts(config).values()),
        [*map(len, PROMPTS)],
    ]


@pytest.fixture
def distinct(tiny_config, tmp_path) -> Config:
    """Settings of two batches, four updates and three passes of each; see the top of this file."""
    files = {}
    for setting, prompts in (("prompts_csv", PROMPTS), ("valid_video_csv", VALIDATION_PROMPTS)):
        file = tmp_path / f"{setting}.csv"
        file.write_text("\n".join(["prompt", *(f'"{prompt}"' for prompt in prompts)]) + "\n")
        files[setting] = [str(file)]
    config = tiny_config.with_settings(**DISTINCT, **files)
    for values in must_differ(config):
        assert len(set(values)) == len(values), values
    return config
