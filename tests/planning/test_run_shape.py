"""What of the settings decides, and what a setting means that a Config does not have yet."""

import dataclasses
from pathlib import Path

import pytest

from hyvideo.config import Config, load_config
from hyvideo.planning.run_shape import DEFAULTS, RunShape

CONFIG = Path(__file__).parent.parent.parent / "configs" / "hunyuanvideo15_480p_8gpu.yaml"


class NewerConfig(Config):
    """With settings of a later version."""

    def flat(self) -> dict:
        return super().flat() | {
            "lora_rank": 16,
            "dp_replicate": 2,
            "activation_checkpointing": "selective",
            "master_weight_type": "bf16",
            "ema_decay": 0.999,
            "reshard_after_forward": False,
        }


def test_the_shape_of_the_shipped_run():
    shape = RunShape.of(load_config(CONFIG), 8)
    assert (shape.replicas, shape.num_shards, shape.rollouts_per_replica) == (4, 8, 2)
    assert (shape.num_branches, shape.trained_steps, shape.has_anchor) == (2, 20, True)
    assert shape.activation_checkpointing == "full" and shape.reference_mode_offload
    assert shape.backwards_per_update == 2 * 20


def test_settings_of_a_later_version_are_read_by_name():
    shape = RunShape.of(NewerConfig(**_sections(load_config(CONFIG))), 8)
    assert (shape.lora_rank, shape.dp_replicate, shape.ema_decay) == (16, 2, 0.999)
    assert (shape.activation_checkpointing, shape.master_weight_type) == ("selective", "bf16")
    assert not shape.reshard_after_forward and shape.num_shards == 4


def test_settings_that_are_not_there_mean_as_it_is_without_them():
    config = load_config(CONFIG, enable_gradient_checkpointing=False)
    shape = RunShape.of(config, 8)
    absent = DEFAULTS.keys() - config.flat().keys()
    assert {name: getattr(shape, name) for name in absent} == {name: DEFAULTS[name] for name in absent}


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


def _sections(config: Config) -> dict:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
