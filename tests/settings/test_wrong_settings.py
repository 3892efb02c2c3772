"""Command lines as users type them: a wrong one is refused with the name of the setting, and an odd
one that makes sense is accepted.

Each goes through the parser of post_train.py and the rules of a run on this machine.
"""

import re
import shlex

import pytest

from hyvideo.checks.rules import check
from hyvideo.settings.command_line import parse
from tests.forked import ROOT

DPO = "--config configs/miniature_dpo.yaml --pairs_csv {folder}/pairs.csv"
DRAFT = "--config configs/miniature_draft.yaml"
NFT = "--config configs/miniature_nft.yaml"
STUDENT = "--config configs/miniature_student.yaml"
FILES = {
    "pairs.csv": "prompt,first,second,answer\na,first.mp4,second.mp4,first\n",
    "spreadsheet.csv": '\ufeff Prompt ,Seed,note\na red ball,1.0,"one, two"\n\na blue cube,,\n,,\n',
    "semicolons.csv": "prompt;seed\na;1\n",
    "header.csv": "prompt\n",
    "seed.csv": "prompt,seed\na,1.5\n",
    "folder with blanks/train.csv": "prompt\na\n",
    "reward.py": "def color(videos, prompts, fps):\n    return [1.0] * len(videos)\n",
    "broken.py": "import nowhere_to_be_found\n",
}

# words of a command line, and the setting or file that the message names
WRONG = [
    # objectives
    (f"{NFT} --sde_window random:2", "sde_window"),
    (f"{DRAFT} --reward_gradient_weight 0", "reward_gradient_weight"),
    (f"{DRAFT} --reward_model yes_no", "reward_model"),
    ("--config configs/miniature_dpo.yaml --pairs_csv=", "pairs_csv"),
    (f"{DPO} --num_generations 4", "num_generations"),
    (f"{STUDENT} --anchor_substeps 1001", "anchor_substeps"),
    ("--anchor_path assets/miniature", "anchor_path"),  # a moving anchor
    ("--reward_model {folder}/broken.py:reward", "broken.py"),
    # files
    ("--prompts_csv {folder}/header.csv", "header.csv"),
    ("--prompts_csv {folder}/seed.csv", "seed.csv"),
]

ODD = [
    "--eta=.7 --learning_rate 1E-5 --weight_decay 0",
    "--height 16 --height 24",  # the last one counts
    "--valid_video_csv= --reward_weights A",
    "--prompts_csv {folder}/spreadsheet.csv",  # a byte order mark, blank rows, seeds as 1.0
    "--prompts_csv {folder}/semicolons.csv",
    "--prompts_csv '{folder}/folder with blanks/train.csv' --output_dir '{folder}/ä b'",
    "--max_steps 1 --save_interval 100 --validation_interval 100",
    "--cfg_scale 1 --guidance_interval 0.1:0.2",  # without guidance nothing is left out
    "--kl_weight 0",
    "--sde_type cps --eta 1",
    "--objective nft --eta 0",
    "--config configs/miniature_dpo.yaml --objective grpo --num_generations 2 --eta 0.5",
    "--reward_model {folder}/reward.py:color --reward_weights '{{\"color\": 1}}'",
    "--lora_rank 4096",  # above the width of the model
    "--seed 18446744073709551615",
    "--fps 0.5 --validation_num_frames 1",
]


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Return the message with which a command line is refused; empty if it is accepted."""
    monkeypatch.chdir(ROOT)
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)

    def _refusal(words: str) -> str:
        start = ["--output_dir", str(tmp_path / "run")]
        if "--config" not in words:
            start += ["--config", "configs/smoke.yaml"]
        try:
            command = parse([*start, *shlex.split(words.format(folder=tmp_path))])
        except SystemExit as end:
            assert end.code == 2
            return capsys.readouterr().err.partition("error:")[2]
        try:
            check(command.config, 1, file=command.file)
        except ValueError as error:
            return str(error)
        return ""

    return _refusal


def names(message: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) is not None


@pytest.mark.parametrize("words, name", WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_command_line_is_refused_and_the_setting_is_named(refusal, words, name):
    message = refusal(words)
    assert names(message, name), message


@pytest.mark.parametrize("words", ODD)
def test_an_odd_command_line_that_makes_sense_is_accepted(refusal, words):
    assert refusal(words) == ""
