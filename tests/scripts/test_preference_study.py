"""The preference_study command: invalid input, and imports of torch only where they are needed."""

import json

import pytest

from scripts import preference_study
from tests.ratings.conftest import write_folder


@pytest.fixture
def call(exit_code, capsys):
    """A function that runs the command in this process and returns its exit code and output."""

    def run(*arguments):
        code = exit_code(preference_study.main, *arguments)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.mark.system
def test_methods_are_folders_or_policies_whose_videos_are_generated(call, tmp_path):
    prompts = ["a red circle moves left", "a blue square moves up"]
    (tmp_path / "prompts.csv").write_text("prompt\n" + "\n".join(prompts) + "\n")
    theirs = write_folder(tmp_path / "theirs", prompts)
    make = (
        "make",
        tmp_path / "study",
        "--raters",
        2,
        "--pairs",
        2,
        "--methods",
        "base",
        f"theirs={theirs}",
    )
    flags = (
        "--config",
        "configs/miniature.yaml",
        "--valid_video_csv",
        tmp_path / "prompts.csv",
        "--validation_steps",
        1,
        "--num_threads",
        1,
    )
    code, output = call(*make, *flags)
    assert code == 0, output
    assert (
        "raters: 2, pairs of each: 2; next: python -m scripts.preference_study serve "
        f"{tmp_path}/study\n" in output
    )
    key = json.loads((tmp_path / "study/key.json").read_text())
    assert key["methods"] == ["base", "theirs"] and len(key["pairs"]) == 2 * 2
    assert {
        source.split("/")[-2] for pair in key["pairs"].values() for source in pair["sources"]
    } == {"base", "theirs"}
    (tmp_path / "study/answers.sqlite").write_bytes(b"no database" * 99)
    code, output = call(*make, *flags)
    old = f"'{tmp_path}/study/videos', '{tmp_path}/study/answers.sqlite'"
    assert code == 2 and str(old) in output
    code, output = call("analyze", tmp_path / "study")
    assert code == 2 and output == "preference_study.py: file is not a database\n"
