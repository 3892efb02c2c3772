"""Promise 11, for files: wrong CSV and YAML files are named in one sentence with exit code 2 before
models are loaded, and files as people and spreadsheets write them are read.

Settings and custom code: tests/test_post_train.py and tests/training/test_custom_objective.py.
"""

import pytest

from tests.forked import ROOT
from tests.promises.runs import Run
from tests.rated_pairs import DPO, write_pairs

PROMPT = "a red circle moves left"


def check_refused(result, *words):
    assert result.code == 2 and "Traceback" not in result.output, result.output
    assert "loading" not in result.output, result.output
    assert all(word in result.output for word in words), result.output


@pytest.mark.system
def test_files_of_spreadsheets_and_editors_are_read(tmp_path):
    prompts = (
        f'\ufeffid, Prompt ,Seed\r\n1,{PROMPT},1.0\r\n"2,000",a blue square moves up,\r\n,,\r\n\r\n'
    )
    (tmp_path / "prompts.csv").write_text(prompts, newline="")
    lines = (ROOT / "configs/smoke.yaml").read_text().splitlines()
    lines = [line for line in lines if not line.startswith(("prompts_csv", "valid_video_csv"))]
    lines += [f"prompts_csv: &prompts {tmp_path}/prompts.csv", "valid_video_csv: *prompts"]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    run = Run(tmp_path, max_steps=1)
    del run.settings["valid_video_csv"]
    result = run.start(config=str(tmp_path / "config.yaml"))
    assert result.code == 0, result.output


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["file not found"]),
        (f"prompt,first_frame\n{PROMPT},none.png\n", ["first_frame", "ref_image_path"]),
        pytest.param(f"prompt,seed\n{PROMPT},1.5\n", ["row 1", "seed"], marks=pytest.mark.system),
        pytest.param(
            f"prompt,ref_image_path\n{PROMPT},none.png\n", ["none.png"], marks=pytest.mark.system
        ),
    ],
)
def test_wrong_prompts_are_refused(tmp_path, content, words):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refused(Run(tmp_path).start(prompts_csv=str(path)), "mine.csv", *words)


@pytest.mark.system
@pytest.mark.parametrize(
    "content, words",
    [
        ("max_step: 1\n", ["max_step", "max_steps"]),
        ("max_steps: !!python/object/apply:os.system ['touch executed']\n", ["YAML"]),
    ],
)
def test_wrong_settings_files_are_refused(tmp_path, content, words):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    check_refused(Run(tmp_path).start(config=str(path)), *words)


@pytest.mark.system
def test_wrong_pairs_are_refused_and_those_of_spreadsheets_are_read(tmp_path):
    run = Run(tmp_path, **DPO, max_steps=1, lora_rank=2, prompts_csv="")
    for name in list(run.settings):
        if name.startswith(("kl_", "update_ref", "num_updates")) and name not in DPO:
            run.settings.pop(name)
    columns = (" Prompt", "First", "second ", "answer")
    path = write_pairs(tmp_path / "rated", [(PROMPT, "0a.mp4", "none.mp4", "first")], columns)
    check_refused(run.start(pairs_csv=str(path)), "row 1", "none.mp4")
    rows = [(prompt, f".\\{k}a.mp4", f"{k}b.mp4", "First") for k, prompt in enumerate("ab")]
    path = write_pairs(tmp_path / "rated", rows, columns)
    result = run.start(pairs_csv=str(path))
    assert result.code == 0, result.output
