import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from hyvideo.models.versions import ANNOUNCED, RELEASED
from hyvideo.rewards.rewards import SCORERS

ROOT = Path(__file__).resolve().parents[2]
LIGHTX2V = "480p_t2v_step_distilled"
WAN = [name for name, version in RELEASED.items() if version.family == "wan"]


def download(*flags, **environment):
    command = ["bash", "download_weights.sh", *map(str, flags)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )


def planned(*flags):
    """Return the commands that the script would run, each as a list of words."""
    done = download("--dry_run", *flags)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def program(folder, name, script):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_default_is_the_480p_model_with_quoted_text_and_reward():
    commands = planned()
    assert [
        "hf",
        "download",
        "tencent/HunyuanVideo-1.5",
        "--include",
        "transformer/480p_t2v/*",
    ] in [command[:5] for command in commands]
    hubs = [command[2] for command in commands if command[0] == "hf"]
    assert "KlingTeam/VideoReward" in hubs and "google/byt5-small" in hubs
    assert "black-forest-labs/FLUX.1-Redux-dev" not in hubs
    assert ["modelscope", "download", "--model", "AI-ModelScope/Glyph-SDXL-v2"] in [
        c[:4] for c in commands
    ]


def test_a_version_of_wan_has_a_separate_folder_and_no_glyph_encoder():
    commands = planned("--version", WAN[0])
    assert {command[2] for command in commands} == {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "KlingTeam/VideoReward",
    }
    out = f"./ckpts/{WAN[0]}"
    assert all(command[command.index("--local-dir") + 1].startswith(out) for command in commands)
    from_modelscope = planned("--version", WAN[0], "--source", "modelscope", "--with", "none")
    assert {command[0] for command in from_modelscope} == {"modelscope"}


@pytest.mark.parametrize("name", [*RELEASED, *ANNOUNCED])
def test_every_version_can_be_downloaded(name):
    folder = "transformer" if name in WAN else f"transformer/{name}"
    if name == LIGHTX2V:  # a single file
        return
    assert any(f"{folder}/*" in command for command in planned("--version", name))


def test_the_student_of_lightx2v_is_one_file_with_the_config_of_its_base_model(tmp_path):
    commands = planned("--version", LIGHTX2V, "--with", "none", "--out", tmp_path)
    folder = tmp_path / "transformer" / LIGHTX2V
    weights = "hy1.5_t2v_480p_lightx2v_4step.safetensors"
    last = commands[-4:]
    assert last[0] == [
        "hf",
        "download",
        "lightx2v/Hy1.5-Distill-Models",
        weights,
        "--local-dir",
        str(folder),
    ]
    # as the two downloads leave the folder
    config = folder / "transformer" / "480p_t2v" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    (folder / weights).write_text("weights")
    for command in last[2:]:
        subprocess.run(command, check=True)
    assert (folder / "config.json").read_text() == "{}"
    assert (folder / "diffusion_pytorch_model.safetensors").read_text() == "weights"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--version", "480p"], "unknown version 480p"),
        (["--sorce", "modelscope"], "unknown argument --sorce"),
    ],
)
def test_a_usage_error_exits_with_2_and_a_reason(flags, words):
    done = download("--dry_run", *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout


@pytest.fixture
def isolated_script(tmp_path):
    """A copy of the script without the environment, and a folder for the programs on its PATH."""
    (tmp_path / "download_weights.sh").write_text((ROOT / "download_weights.sh").read_text())
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sed", "env"):
        (programs / name).symlink_to(shutil.which(name))

    def run(*flags, **environment):
        environment = {"PATH": str(programs), "HOME": str(tmp_path)} | environment
        command = [programs / "bash", tmp_path / "download_weights.sh", *flags]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    return programs, run


def test_missing_programs_are_reported_before_the_first_download(isolated_script):
    programs, run = isolated_script
    assert "hf and huggingface-cli are missing" in run("--with", "reward").stderr
    program(programs, "hf", "exit 1")
    message = run("--with", "quoted_text").stderr
    assert "pip install modelscope" in message and "--with reward" in message
    assert "glyph" not in run("--source", "modelscope", "--with", "none").stderr
    gated = run("--with", "i2v")
    assert gated.returncode == 2 and "HF_TOKEN" in gated.stderr


def test_the_printed_commands_are_run_until_one_fails(isolated_script):
    programs, run = isolated_script
    program(programs, "huggingface-cli", 'echo "got $2"')
    done = run("--with", "i2v", HF_TOKEN="token")
    assert done.returncode == 0, done.stderr
    assert "got black-forest-labs/FLUX.1-Redux-dev" in done.stdout
    assert "--pretrained_model_root ./ckpts --print_config" in done.stderr
    program(programs, "huggingface-cli", "exit 3")
    failed = run("--with", "none")
    assert failed.returncode == 3
    assert len(failed.stdout.splitlines()) == 1


def test_hpsv3_and_its_tokenizer_lie_where_the_scorer_reads_them():
    commands = planned("--version", WAN[0], "--with", "hpsv3")
    folder = f"./ckpts/{WAN[0]}/{SCORERS['hpsv3'].folder}"
    words = [word for command in commands if command[-1] == folder for word in command]
    assert {"HPSv3.safetensors", "config.json", "tokenizer.json"} <= set(words)
