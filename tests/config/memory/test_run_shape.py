"""What of the settings decides."""

from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config
from hyvideo.config.memory.run_shape import RunShape

CONFIG = Path(__file__).parents[3] / "configs" / "hunyuanvideo15_480p_8gpu.yaml"


def test_the_shape_of_the_shipped_run():
    shape = RunShape.of(load_config(CONFIG), 8)
    assert (shape.replicas, shape.num_shards, shape.rollouts_per_replica) == (4, 8, 2)
    assert (shape.num_branches, shape.trained_steps, shape.has_anchor) == (2, 20, True)
    assert shape.activation_checkpointing == "full" and shape.reference_mode_offload
    assert shape.backwards_per_update == 2 * 20


def test_the_settings_are_read_by_name():
    changes = {"lora_rank": 16, "dp_replicate": 2, "ema_decay": 0.999, "reshard_after_forward": False}
    changes |= {"activation_checkpointing": "selective", "master_weight_type": "bf16"}
    shape = RunShape.of(load_config(CONFIG, **changes), 8)
    assert {name: getattr(shape, name) for name in changes} == changes
    assert shape.num_shards == 4
    without = RunShape.of(load_config(CONFIG, **changes, enable_gradient_checkpointing=False), 8)
    assert without.activation_checkpointing == "none"


@pytest.mark.parametrize(
    "changes, gigabytes",
    [
        ({}, 4.57),
        ({"reward_precision": "fp32_math"}, 9.2),
        ({"reward_offload": True}, 0),
        ({"remote_reward_url": "http://127.0.0.1:8000"}, 0),
        ({"reward_model": ["videoalign", "clip"]}, 4.57 + 1.72),
    ],
)
def test_reward_models_count_where_they_are(changes, gigabytes):
    shape = RunShape.of(load_config(CONFIG, **changes), 8)
    assert shape.reward_bytes == pytest.approx(gigabytes * 1e9)
