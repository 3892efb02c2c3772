"""Promise 15: a program that takes more than minutes leaves complete files or none, and a repeat
continues.

Full disks and errors: tests/test_generate.py, tests/generation/test_evaluate.py,
tests/training/test_export.py and tests/ratings/test_reward_training.py.
"""

import signal
import subprocess

import pytest

from tests.forked import ROOT, python

pytestmark = pytest.mark.system

# Kills the process before the N-th file or folder whose name ends with the suffix is published.
KILLED = """
import os, runpy, signal, sys
suffix, number, module = sys.argv[1], int(sys.argv[2]), sys.argv[3]
replace = os.replace
published = []

def counted(source, target):
    if str(target).endswith(suffix):
        published.append(target)
        if len(published) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = counted
sys.argv = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
PROMPTS = ["a red circle moves up", "a blue square moves left", "a green circle moves down"]


def run(*words):
    command = [python(), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def files(folder, suffix=""):
    """Return the contents of the visible files in a folder, by relative path."""
    found = [path.relative_to(folder) for path in folder.rglob(f"*{suffix}")]
    visible = [path for path in found if not any(part[0] == "." for part in path.parts)]
    return {
        str(path): (folder / path).read_bytes() for path in visible if (folder / path).is_file()
    }


def check(command, tmp_path, *, kill_at, number=1, suffix="", repeated=""):
    """Run a command whole, and another time with a kill and a repeat; compare their files."""
    module, *flags = command
    folder, out = tmp_path / "whole" / "out", tmp_path / "out"  # a model card has its name
    whole = run("-m", module, *flags, folder)
    assert whole.returncode == 0, whole.stderr
    expected = files(folder, suffix)
    killed = run("-c", KILLED, kill_at, number, module, *flags, out)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert files(out, suffix).items() < expected.items()  # complete files, or none
    again = run("-m", module, *flags, out)
    assert again.returncode == 0 and repeated in again.stderr, again.stderr
    assert files(out, suffix) == expected
    assert not [*tmp_path.rglob(".lease")]


def test_generate_makes_the_videos_that_are_missing(finished, tmp_path):
    command = ["generate", "--checkpoint_path", finished.checkpoint(3), "--prompt", *PROMPTS]
    command.append("--output_path")
    flags = {"kill_at": ".mp4", "number": 2, "suffix": ".mp4"}
    check(command, tmp_path, **flags, repeated="of 3 videos")


def test_export_leaves_no_half_of_a_folder(finished, tmp_path):
    command = ["scripts.export", "--lora_path", finished.checkpoint(3) / "lora", "--output_dir"]
    check(command, tmp_path, kill_at="out")


def test_evaluate_continues_with_the_policies_that_are_not_evaluated(finished, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("\n".join(["prompt", *PROMPTS]) + "\n")
    command = ["scripts.evaluate", "--checkpoint_path", finished.checkpoint(3), "--reward_model"]
    command += ["miniature", "--valid_video_csv", prompts, "--output_dir"]
    check(command, tmp_path, kill_at="scores.csv")
