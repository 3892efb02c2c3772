"""Command lines as users type them: a wrong one is refused with the name of the setting, and an odd
one that makes sense is accepted.

Each goes through the parser of post_train.py and the rules of a run on this machine.
"""

import re
import shlex

import pytest

from hyvideo.settings.command_line import parse
from hyvideo.settings.rules import check
from tests.forked import ROOT

DPO = "--config configs/miniature_dpo.yaml --pairs_csv {folder}/pairs.csv"
DRAFT = "--config configs/miniature_draft.yaml"
NFT = "--config configs/miniature_nft.yaml"
STUDENT = "--config configs/miniature_student.yaml"
FILES = {
    "pairs.csv": "prompt,first,second,answer\na,first.mp4,second.mp4,first\n",
    "spreadsheet.csv": '\ufeff Prompt ,Seed,note\na red ball,1.0,"one, two"\n\na blue cube,,\n,,\n',
    "semicolons.csv": "prompt;seed\na;1\n",
    "caption.csv": "caption\na\n",
    "header.csv": "prompt\n",
    "seed.csv": "prompt,seed\na,1.5\n",
    "folder with blanks/train.csv": "prompt\na\n",
    "anchors.yaml": "height: &side 16\nwidth: *side\n",
    "reward.py": "def color(videos, prompts, fps):\n    return [1.0] * len(videos)\n",
    "broken.py": "import nowhere_to_be_found\n",
}

# words of a command line, and the setting or file that the message names
WRONG = [
    # typing mistakes and values of another kind
    ("--learning_rte 1e-5", "learning_rate"),
    ("--learning_rate 1e-5,", "learning_rate"),
    ("--learning_rate -1e-5", "learning_rate"),
    ("--learning_rate 0", "learning_rate"),
    ("--learning_rate inf", "learning_rate"),
    ("--eta=nan", "eta"),
    ("--height 16px", "height"),
    ("--max_steps 1e3", "max_steps"),
    ("--max_steps 0", "max_steps"),
    ("--use_muon maybe", "use_muon"),
    ("--dtype float32", "dtype"),
    ("--device gpu", "device"),
    ("--kl_schedule cosine", "kl_schedule"),
    ("--seed=-1", "seed"),
    ("--batch_size 4 --batch_size", "batch_size"),
    ("--world_size 8", "world_size"),
    # sampling
    ("--sde_type dancegrpo", "sde_type"),
    ("--sde_type {folder}/nowhere.py:F", "sde_type"),
    ("--sigmas 1,0.5,0.7", "sigmas"),
    ("--sigmas 1,0.5", "sigmas"),  # there are four steps
    ("--match_noise cps", "match_noise"),
    ("--match_noise sage_grpo:0.7 --eta 0.5", "eta"),
    ("--guidance_interval 0.9:0.1", "guidance_interval"),
    ("--sde_window fixed:3:4", "sde_window"),
    ("--eta 0", "eta"),
    # objectives
    ("--objective ppo", "objective"),
    ("--clip_range 0.1 --objective nft", "clip_range"),
    (f"{NFT} --nft_levels 0", "nft_levels"),
    (f"{NFT} --sde_window random:2", "sde_window"),
    (f"{DRAFT} --reward_gradient_weight 0", "reward_gradient_weight"),
    (f"{DRAFT} --reward_model yes_no", "reward_model"),
    (f"{DRAFT} --reward_video file", "reward_video"),
    ("--config configs/miniature_dpo.yaml --pairs_csv=", "pairs_csv"),
    (f"{DPO} --num_generations 4", "num_generations"),
    (f"{DPO} --cfg_scale 3", "cfg_scale"),
    (f"{DPO} --pair_weights VQ", "pair_weights"),
    (f"{STUDENT} --eta 0.5", "eta"),
    (f"{STUDENT} --anchor_substeps 1001", "anchor_substeps"),
    ("--anchor_path assets/miniature", "anchor_path"),  # a moving anchor
    # rewards and weights
    ("--reward_model {folder}/nowhere.py:reward", "nowhere.py"),
    ("--reward_model {folder}/broken.py:reward", "broken.py"),
    ("--reward_model video_align", "reward_model"),
    ("--reward_weights C", "reward_weights"),
    ("--reward_config {folder}/nowhere.yaml", "reward_config"),
    ("--lora_target_modules to_q", "lora_rank"),
    # files, folders and processes
    ("--config {folder}/nowhere.yaml", "config"),
    ("--prompts_csv {folder}/nowhere.csv", "nowhere.csv"),
    ("--prompts_csv {folder}/header.csv", "header.csv"),
    ("--prompts_csv {folder}/caption.csv", "caption.csv"),
    ("--prompts_csv {folder}/semicolons.csv", "semicolons.csv"),
    ("--prompts_csv {folder}/seed.csv", "seed.csv"),
    ("--valid_video_csv {folder}/nowhere.csv", "nowhere.csv"),
    ("--output_dir {folder}/pairs.csv", "output_dir"),
    ("--resume_from_checkpoint {folder}", "resume_from_checkpoint"),
    ("--pretrained_lora_path {folder}/nowhere", "pretrained_lora_path"),
    ("--on_reward_hacking stop --valid_video_csv=", "on_reward_hacking"),
    ("--sp_size 2", "sp_size"),
]

ODD = [
    "--eta=.7 --learning_rate 1E-5 --weight_decay 0",
    "--use_muon --report False --enable_compile no",
    "--height 16 --height 24",  # the last one counts
    "--valid_video_csv=",
    "--valid_video_csv= --reward_weights A",
    "--prompts_csv {folder}/spreadsheet.csv",  # a byte order mark, blank rows, seeds as 1.0
    "--prompts_csv '{folder}/folder with blanks/train.csv' --output_dir '{folder}/ä b'",
    "--prompts_csv {folder}/spreadsheet.csv assets/miniature/prompts/train.csv",
    "--prompts_csv assets/miniature/prompts/train.csv --valid_video_csv "
    "assets/miniature/prompts/train.csv",
    "--max_steps 1 --save_interval 100 --validation_interval 100",
    "--save_total_limit 0 --save_minutes 0 --log_num_videos 0",
    "--cfg_scale 0 --shift 1",
    "--cfg_scale 1 --guidance_interval 0.1:0.2",  # without guidance nothing is left out
    "--kl_weight 0 --kl_coef 0 --kl_min_coef 0",
    "--kl_weight 0",
    "--num_generations 8 --num_updates_per_rollout 1",
    "--batch_size 4 --gradient_accumulation_steps 2",
    "--sigmas 1,0.9,0.5,0.2",
    "--sde_type cps --eta 1",
    "--match_noise sage_grpo:0.7",
    "--sde_window sliding:2",
    "--objective nft --eta 0",
    "--config configs/miniature_dpo.yaml --objective grpo --num_generations 2 --eta 0.5",
    f"{NFT} --reward_gradient_weight 0",
    f"{DRAFT} --nft_levels 0",
    "--reward_model {folder}/reward.py:color --reward_weights '{{\"color\": 1}}'",
    "--reward_weights '{{\"VQ\": -1}}'",
    "--reward_config '{{\"miniature\": {{}}}}'",
    "--lora_rank 2 --lora_alpha 0 --lora_target_modules attn.*",
    "--lora_rank 4096",  # above the width of the model
    "--resume_from_checkpoint= --allow_changed_settings all",
    "--negative_prompt ''",
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


def test_mistakes_of_all_kinds_are_reported_at_once(refusal):
    """An unknown flag, text for a number, a number out of range, text that stands for levels, a
    setting of another objective, and a rule between settings.
    """
    message = refusal(
        "--etta 1 --batch_size two --learning_rate -1 --sigmas 1,0.5,0.7 --nft_levels 2 "
        "--lora_target_modules to_q"
    )
    for name in "eta batch_size learning_rate sigmas nft_levels lora_target_modules".split():
        assert names(message, name), message
