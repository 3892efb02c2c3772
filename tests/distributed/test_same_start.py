"""Tests of what the ranks of a run must have in common, and of how they agree."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import agree
from hyvideo.distributed.same_start import code_digest, require_same_start
from tests.distributed.launch import launch, start

CPU = torch.device("cpu")


def problem_of(check, *arguments) -> str:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def on_two_ranks() -> dict[str, object]:
    """Return the error of each check by case."""
    mesh = ranks.start(1, CPU, timeout=60)
    first = mesh.is_main
    found = {
        "equal": problem_of(agree, "the seed", 1.0, mesh),
        "a number": problem_of(agree, "the seed", mesh.rank, mesh),
        "a mapping": problem_of(agree, "the setting", {"eta": mesh.rank, "seed": 1}, mesh),
        "an absent entry": problem_of(agree, "the file of", {"a": 1} if first else {}, mesh),
    }
    setting = {"learning_rate": 0.1 * (1 + mesh.rank)}
    found["a setting"] = problem_of(require_same_start, setting, CPU, mesh)
    sys.version_info = SimpleNamespace(major=3, minor=11, micro=mesh.rank)
    found["a patch version of Python"] = problem_of(require_same_start, {}, CPU, mesh)
    sys.version_info = SimpleNamespace(major=3, minor=11 + mesh.rank, micro=0)
    found["a minor version of Python"] = problem_of(require_same_start, {}, CPU, mesh)
    return found


@pytest.fixture(scope="module")
def results():
    return launch(f"{__name__}:on_two_ranks", 2)


@pytest.mark.parametrize("case", ["equal", "a patch version of Python"])
def test_ranks_with_the_same_values_agree(results, case):
    assert [found[case] for found in results] == ["", ""]


@pytest.mark.parametrize(
    "case, named",
    [
        ("a mapping", "the setting eta must"),
        ("a setting", "learning_rate must"),
        ("a minor version of Python", "the version of Python must"),
    ],
)
def test_a_difference_is_named_on_all_ranks(results, case, named):
    first, second = (found[case] for found in results)
    assert first == second and named in first
    assert "seed" not in results[0]["a mapping"]


@pytest.mark.system
def test_a_rank_with_another_setting_ends_the_run_before_it_starts(tmp_path):
    program = (
        "import os, sys, post_train\n"
        "sys.argv += [f'--learning_rate={1 + int(os.environ[\"RANK\"])}e-4']\n"
        "sys.exit(post_train.main())\n"
    )
    (tmp_path / "program.py").write_text(program)
    flags = ["--config", "configs/smoke.yaml", "--batch_size=4", f"--output_dir={tmp_path}/run"]
    first, _ = start(2, tmp_path / "program.py", *flags)  # rank 1 waits for it, and is ended
    code, stderr = first.exception().args
    assert code == 2 and "learning_rate must be the same on all ranks" in stderr, stderr
    assert not (tmp_path / "run").exists()


def test_a_changed_or_renamed_file_changes_the_digest_of_the_code(tmp_path):
    file, digests = tmp_path / "hyvideo" / "a.py", set()
    file.parent.mkdir()
    file.write_text("x = 1\n")
    digests.add(code_digest(tmp_path))
    file = file.rename(file.with_name("b.py"))
    digests.add(code_digest(tmp_path))
    file.write_text("x = 2\n")
    digests.add(code_digest(tmp_path))
    assert len(digests) == 3
