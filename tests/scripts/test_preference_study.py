"""The command: what it refuses, and that only `make` waits for torch."""

import json
import subprocess
import sys

import pytest

from scripts import preference_study
from tests.evaluation.preference.conftest import write_folder


@pytest.fixture
def call(exit_code, capsys):
    """Runs the command in this process; gives its exit code and what it says."""

    def run(*arguments):
        code = exit_code(preference_study.main, *arguments)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_arguments_are_read_and_raters_are_served_without_torch():
    code = (
        "import sys, scripts.preference_study, hyvideo.evaluation.preference.analysis; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_are_folders_or_policies_which_make_their_videos_now(call, tmp_path):
    prompts = ["a red circle moves left", "a blue square moves up"]
    (tmp_path / "prompts.csv").write_text("prompt\n" + "\n".join(prompts) + "\n")
    theirs = write_folder(tmp_path / "theirs", prompts)
    make = ("make", tmp_path / "study", "--raters", 2, "--pairs", 2, "--methods", "base", f"theirs={theirs}")
    flags = (
        "--config",
        "configs/miniature.yaml",
        "--valid_video_csv",
        tmp_path / "prompts.csv",
        "--validation_steps",
        1,
    )
    code, said = call(*make, "--checks", 1, *flags)
    assert code == 0, said
    key = json.loads((tmp_path / "study/key.json").read_text())
    assert key["methods"] == ["base", "theirs"] and len(key["pairs"]) == 2 * 4
    assert {source.split("/")[-2] for pair in key["pairs"].values() for source in pair["sources"]} == {"base", "theirs"}
    (tmp_path / "study/answers.sqlite").write_bytes(b"no database" * 99)
    code, said = call(*make, *flags)
    assert code == 2 and f"delete '{tmp_path}/study/videos', '{tmp_path}/study/answers.sqlite', or" in said
    code, said = call("analyse", tmp_path / "study")
    assert code == 2 and said == "preference_study.py: file is not a database\n"
    (tmp_path / "study/answers.sqlite").unlink()
    (tmp_path / "other.json").write_text('{"token": "of another study", "answers": {"x": {}}}')
    code, said = call("analyse", tmp_path / "study", "--answers", tmp_path / "other.json")
    assert code == 2 and said.startswith(f"preference_study.py: {tmp_path}/other.json: an answer is of a rater's own")
    code, said = call("serve", tmp_path / "study", "--static", tmp_path / "pages")
    assert code == 0 and f"{tmp_path}/pages: a folder for each of 2 raters" in said


def test_what_cannot_be_a_study_is_refused_before_a_policy_makes_videos(call, tmp_path):
    wrong = {
        "--raters must be from 1": ("--raters", 0, "--methods", "base", "tuned=assets/miniature"),
        "two different names or more": ("--methods", "base"),
        "got 'a=/tmp' 'a=/'": ("--methods", "a=/tmp", "a=/"),
        "got 'base' 'theirs=/nowhere'": ("--methods", "base", "theirs=/nowhere"),
        "unknown flag --rater;": ("--rater", 5, "--methods", "base", "theirs=/nowhere"),
    }
    for says, flags in wrong.items():
        code, said = call("make", tmp_path / "study", *flags, "--config", "configs/miniature.yaml")
        assert code == 2 and says in said, said
    for command in ("serve", "analyse"):
        code, said = call(command, tmp_path / "study")
        assert code == 2 and f"{tmp_path}/study/study.json must be as `make` writes it" in said
    assert not (tmp_path / "study").exists()
    for edited in (
        '{"questions": {"VQ": "?",}}',
        '{"questions": {"VQ": "?"}}',
        '{"questions": ["?"], "raters": {}}',
        "[]",
    ):
        (tmp_path / "study.json").write_text(edited)
        code, said = call("serve", tmp_path, "--static", tmp_path / "pages")
        assert code == 2 and f"{tmp_path}/study.json must be as `make` writes it" in said, said
