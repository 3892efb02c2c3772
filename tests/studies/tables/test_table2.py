"""Table 2 with two small cells, from training to its files."""

import json

import pytest
import torch

from scripts import reproduce_table2
from tests.shallow import SHALLOW

FLAGS = ["--config", "configs/smoke.yaml", "--settings", "B", "--kl", "none", "--seeds", "0"]
EXTRA = (
    f"--pretrained_model_root {SHALLOW} --max_steps 1 --grpo_sampling_steps 2 --cfg_scale 1 "
    "--learning_rate 1e-2 --validation_repeats 2 --validation_steps 2 "
    "--log_num_videos 0 --report false"
)


@pytest.fixture
def reproduce(exit_code, tiny_config, forked_programs):
    def run(*flags):
        threads = torch.get_num_threads()
        code = exit_code(reproduce_table2.main, *FLAGS, "--extra", EXTRA, *flags)
        torch.set_num_threads(threads)
        return code

    return run


@pytest.mark.slow
def test_two_cells_are_trained_once_and_evaluated_like_validation(reproduce, tmp_path, capfd):
    out, methods = tmp_path / "table", ["--methods", "flow_grpo", "sage_grpo"]
    assert reproduce("--output_dir", out, *methods, "--only_cell", "B-sage_grpo-none-eq-seed0") == 0
    assert not (out / "table2.md").exists()
    assert reproduce("--output_dir", out, *methods, "--jobs", 2) == 0
    output = capfd.readouterr().out
    assert output.count("seed0: trained") == 2 and "| Base model |" in output
    assert "| SAGE-GRPO against FlowGRPO, no KL, equalizer | B | one seed |" in output
    scores = json.loads((out / "scores/B-sage_grpo-none-eq-seed0.json").read_text())
    recorded = out / "cells/B-sage_grpo-none-eq-seed0/samples/000001"
    validated = json.loads((recorded / "scores.json").read_text())
    # Shapes and threads are the same, so the videos are bit-identical.
    assert [v["Overall"] for v in scores["videos"]] == [v["Overall"] for v in validated]
    assert [v["group"] for v in scores["videos"]] == [v["group"] for v in validated]
    frechet = json.loads((recorded / "measures.json").read_text())["frechet_distance"]
    assert scores["measures"]["frechet_distance"] == frechet
    base = json.loads((out / "scores/base.json").read_text())
    assert [v["Overall"] for v in base["videos"]] != [v["Overall"] for v in scores["videos"]]

    assert reproduce("--output_dir", out, *methods) == 0
    output = capfd.readouterr().out
    assert (
        "2 cells, 0 to run" in output
        and "evaluated" not in output
        and "trained" not in output.replace("trained seed", "")
    )


def test_a_dry_run_writes_nothing_and_an_unknown_cell_is_an_error(reproduce, tmp_path, capfd):
    assert reproduce("--output_dir", tmp_path / "table", "--dry_run") == 0
    assert not (tmp_path / "table").exists()
    assert reproduce("--output_dir", tmp_path / "table", "--only_cell", "nothing") == 2
    assert "--only_cell" in capfd.readouterr().err
    shared = ("--num_gpus", "8", "--jobs", "2", "--dry_run")
    assert reproduce("--output_dir", tmp_path / "table", *shared) == 2
    assert "--num_gpus" in capfd.readouterr().err
