"""The planner as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFIG = ("--config", "configs/hunyuanvideo15_480p_8gpu.yaml")


def plan(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "scripts.plan", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_plan_has_memory_cost_combinations_and_a_verdict():
    done = plan(*CONFIG, "--world_size", "8", "--gpu_memory", "80", "--rate", "400", "--sp_size", "4")
    assert done.returncode == 0 and not done.stderr
    for said in ("8.327 B parameters", "8 = 2 replicas x sp_size 4", "optimizer state", "peak ", "240 forward-equiv"):
        assert said in done.stdout
    assert "legal near it" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("fits: ")


def test_a_flag_of_the_run_changes_the_plan_and_the_verdict_is_the_last_line():
    done = plan(*CONFIG, "--enable_gradient_checkpointing", "false", "--gpu_memory", "60")
    assert done.returncode == 0
    assert "makes it fit: --enable_gradient_checkpointing true" in done.stdout.splitlines()[-1]


def test_a_world_that_sp_size_does_not_divide_is_answered_with_legal_ones():
    done = plan(*CONFIG, "--world_size", "7")
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith("illegal: ") and "got 7 and sp_size 2" in last and "world_size 8" in last


def test_the_miniature_is_planned_from_its_own_configuration():
    done = plan("--config", "configs/miniature.yaml", "--world_size", "1")
    assert done.returncode == 0
    assert "4 blocks of width 96" in done.stdout


def test_the_table_in_the_documentation_is_the_one_that_is_made():
    done = plan(*CONFIG, "--table")
    assert done.returncode == 0
    document = ROOT / "docs" / "memory.md"
    assert done.stdout == document.read_text(), f"make {document.name} again, by the command in it"


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((*CONFIG, "--wold_size", "8"), "unknown flag --wold_size"),
        ((*CONFIG, "--world_size", "0"), "--world_size must be a positive number, got 0"),
        ((*CONFIG, "--rate", "nan"), "--rate must be a positive number, got nan"),
        ((*CONFIG, "--gpu_memory", "much"), "invalid float value: 'much'"),
        ((*CONFIG, "--batch_size", "0"), "batch_size must be at least 1, got 0"),
        ((*CONFIG, "--height", "350"), "height must be a multiple of 16, got 350"),
        ((*CONFIG, "--transformer_version", "beauty"), "transformer_version must be one of"),
        (("--config", "nowhere.yaml"), "must name a readable YAML file, got 'nowhere.yaml'"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(arguments, said):
    done = plan(*arguments)
    assert done.returncode == 2 and not done.stdout
    messages = [line for line in done.stderr.splitlines() if line.startswith("plan.py: ")]
    assert len(messages) == 1 and said in messages[0]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 4
