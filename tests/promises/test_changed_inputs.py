"""Promise 12: on resume, changed settings and inputs are listed and refused, and accepted one by one
by name. Inputs count as they are parsed.
"""

import shutil

import pytest

from hyvideo.files.files import ROOT
from tests.promises.runs import Run, flip_a_byte

PROMPTS = "prompt\na red circle moves left\na blue square moves up\n"
REWARD = """
def redness(videos, prompts, fps):
    values = [float(video[:, 0].float().mean()) / 255 for video in videos]
    return {"VQ": values, "MQ": values, "TA": values}
"""


@pytest.fixture
def run(tmp_path):
    """A run of one iteration with files of its own, which continues up to the second one."""
    (tmp_path / "prompts.csv").write_text(PROMPTS)
    (tmp_path / "mine.py").write_text(REWARD)
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    run = Run(
        tmp_path,
        max_steps=2,
        prompts_csv=str(tmp_path / "prompts.csv"),
        reward_model=f"{tmp_path}/mine.py:redness",
        pretrained_model_root=str(root),
        random_weights="false",
    )
    result = run.start(max_steps=1)
    assert result.code == 0, result.output
    return run


def test_changes_are_refused_all_at_once_and_accepted_by_name(run, tmp_path):
    (tmp_path / "prompts.csv").write_text(PROMPTS + "a green triangle moves right\n")
    changed = {"learning_rate": 1e-4, "save_interval": 2}
    before = run.files()
    refused = run.start(**changed)
    assert refused.code == 2 and "Traceback" not in refused.output
    # settings are compared before models and files are read
    assert "--allow_changed_settings learning_rate" in refused.output
    refused = run.start(**changed, allow_changed_settings="learning_rate")
    assert refused.code == 2 and "--allow_changed_settings prompts_csv" in refused.output
    assert run.files() == before
    result = run.start(**changed, allow_changed_settings=["learning_rate", "prompts_csv"])
    assert result.code == 0, result.output
    shown = result.output.partition("changed settings")[2]
    assert all(name in shown for name in ("learning_rate", "save_interval", "prompts_csv"))


@pytest.mark.system
def test_columns_that_are_not_read_and_line_ends_are_no_changes(run, tmp_path):
    text = PROMPTS.replace("prompt\n", "prompt,note\n").replace("left\n", "left,good\n")
    (tmp_path / "prompts.csv").write_bytes((text + "\n").replace("\n", "\r\n").encode())
    result = run.start()
    assert result.code == 0, result.output


@pytest.mark.system
def test_a_file_of_prompts_may_move_and_weights_may_be_spelled_otherwise(run, tmp_path):
    weights = ('{"VQ":1,"TA":0.5}', '{ "TA": 0.5, "VQ": 1.0 }')
    shutil.rmtree(run.out)
    assert run.start(max_steps=1, reward_weights=weights[0]).code == 0
    moved = (tmp_path / "prompts.csv").rename(tmp_path / "moved.csv")
    changed = run.start(prompts_csv=str(moved), reward_weights='{"VQ":1,"TA":0.4}')
    assert changed.code == 2 and "--allow_changed_settings reward_weights" in changed.output
    result = run.start(prompts_csv=str(moved), reward_weights=weights[1])
    assert result.code == 0, result.output


@pytest.mark.system
@pytest.mark.parametrize("name", ["reward_model", "pretrained_model_root/transformer"])
def test_changed_code_and_weights_are_refused(run, tmp_path, name):
    if name == "reward_model":
        (tmp_path / "mine.py").write_text(REWARD.replace("video[:, 0]", "video[:, 1]"))
    else:
        (file,) = (tmp_path / "root" / "transformer" / "miniature").glob("*.safetensors")
        flip_a_byte(file)
    refused = run.start()
    assert refused.code == 2 and f"--allow_changed_settings {name}" in refused.output
    assert run.start(allow_changed_settings=name).code == 0
