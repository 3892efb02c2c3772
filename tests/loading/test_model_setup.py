"""Deterministic runs, and the identity of the encoders of stored conditions."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch


def train_twice(folder):
    """Return the metrics and the torch settings of a run and of a run with ``deterministic``."""
    import os

    import post_train
    from hyvideo.settings.command_line import load_config

    found = []
    for deterministic in (False, True):
        settings = {
            "output_dir": str(Path(folder) / str(deterministic)),
            "deterministic": deterministic,
        }
        settings |= {
            "max_steps": 1,
            "optimizer": "muon",
            "num_threads": 1,
            "report_to": ["none"],
            "log_video_interval": 0,
        }
        settings |= {
            "batch_size": 2,
            "num_generations": 2,
            "mini_batch_size_per_update": 1,
            "grpo_sampling_steps": 2,
        }
        settings |= {"valid_video_csv": "", "kl_warmup_updates": 1}
        config = load_config("configs/smoke.yaml", **settings)
        with ExitStack() as at_end:
            post_train.build(config, at_end).train()
        (line,) = (Path(config.record.output_dir) / "metrics.jsonl").read_text().splitlines()
        flags = {
            "algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn": torch.backends.cudnn.deterministic,
            "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "filled": torch.utils.deterministic.fill_uninitialized_memory,
        }
        found.append([json.loads(line), flags])
    return found


@pytest.mark.slow
def test_a_deterministic_run_works_and_has_the_same_results_on_a_cpu(tmp_path):
    (((plain, before), (deterministic, after)),) = launch(
        f"{__name__}:train_twice", 1, str(tmp_path)
    )
    assert before == {"algorithms": False, "cudnn": False, "cublas": None, "filled": True}
    assert after == {"algorithms": True, "cudnn": True, "cublas": ":4096:8", "filled": False}
    compared = [name for name in plain if not name.startswith(("time/", "memory/", "perf/"))]
    assert (
        len(compared) > 20
        and [name for name in compared if plain[name] != deterministic[name]] == []
    )
