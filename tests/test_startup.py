"""What only reads or refuses ends before torch is imported. No test here measures time."""

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.forked import LIGHT, ROOT, python

# Runs a program in a process without torch, and writes what it has imported after its output.
PROGRAM = """
import atexit, json, runpy, sys
name, sys.argv = sys.argv[1], sys.argv[1:]
slow = ("torch", "diffusers", "transformers", "peft")
atexit.register(lambda: print("\\n" + json.dumps([each for each in slow if each in sys.modules])))
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
RUN = "--config configs/miniature.yaml"


def program(*words: str, preload: str = LIGHT) -> tuple[int, str, list[str]]:
    """Return the exit code of a program, its output, and which slow packages it has imported, also
    those of the ``preload`` that all programs start with.
    """
    done = subprocess.run(
        [python(preload), "-c", PROGRAM, *words], cwd=ROOT, capture_output=True, text=True
    )
    imported = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, done.stdout + done.stderr, imported


@pytest.mark.parametrize(
    "name",
    [
        "post_train",
        "generate",
        "scripts.evaluate",
        "scripts.compare_policies",
        "scripts.compare_recipes",
        "scripts.improve",
        "scripts.rate",
        "scripts.export",
        "scripts.report",
        "scripts.audit",
        "scripts.launch",
        "scripts.rehearse",
    ],
)
def test_help_is_printed_without_torch(name):
    code, output, imported = program(name, "--help")
    assert (code, imported) == (0, []) and "usage" in output


@pytest.mark.parametrize(
    "command, named",
    [
        (f"post_train {RUN} --lr 1", "--learning_rate"),
        (f"post_train {RUN} --prompts_csv nowhere.csv", "nowhere.csv"),
        (f"post_train {RUN} --resume_from_checkpoint configs", "resume_from_checkpoint"),
        (f"post_train {RUN} --lora_rank 4 --pretrained_lora_path nowhere", "pretrained_lora_path"),
        (f"generate {RUN} --steps 8", "--steps"),
        (f"generate {RUN} --prompt a --pretrained_model_root nowhere", "nowhere"),
        ("generate --checkpoint_path nowhere --prompt a", "nowhere does not exist"),
        ("generate --checkpoint_path configs --prompt a", "configs is neither"),
        (f"generate {RUN} --lora_path nowhere --prompt a", "nowhere"),
        (f"generate {RUN} --valid_video_csv nowhere.csv", "nowhere.csv"),
        ("generate --resolution 480p --prompt a", "./ckpts"),
        (f"scripts.evaluate {RUN} --output_dir x --checkpoint_path nowhere", "nowhere"),
        (f"scripts.evaluate {RUN} --output_dir x --pretrained_model_root nowhere", "nowhere"),
        (f"scripts.compare_policies {RUN} --output_dir x --policies base a=nowhere", "nowhere"),
        ("scripts.improve --config nowhere.yaml", "nowhere.yaml"),
        ("scripts.improve --config configs/miniature_sft.yaml --prompts_csv no.csv", "no.csv"),
        ("scripts.rate x --config nowhere.yaml --prompts_csv nowhere.csv", "nowhere.yaml"),
        (f"scripts.rate x {RUN} --prompts_csv nowhere.csv", "nowhere.csv"),
        ("scripts.rate x --videos nowhere", "nowhere"),
        ("scripts.export --checkpoint_path nowhere --output_dir x", "nowhere does not exist"),
        ("scripts.export --checkpoint_path configs --output_dir x", "configs is neither"),
        ("scripts.export --lora_path nowhere --output_dir x", "nowhere"),
        ("scripts.report nowhere", "nowhere"),
        ("scripts.report --videos nowhere", "nowhere"),
        ("scripts.audit nowhere", "nowhere"),
        ("scripts.launch --nproc_per_node 2 post_train.py --config nowhere.yaml", "nowhere.yaml"),
        (f"scripts.launch --nproc_per_node 2 post_train.py {RUN} --lr 1", "--learning_rate"),
        (
            "scripts.launch --nproc_per_node 2 post_train.py --config configs/wan21_1gpu_nft.yaml",
            "ckpts",
        ),
        ("scripts.rehearse --config nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_wrong_command_ends_without_torch(command, named):
    code, output, imported = program(*command.split())
    assert (code, imported) == (2, []) and named in output


def test_a_lora_is_exported_without_diffusers_and_peft(tmp_path):
    """Both take seconds, and neither reads or writes the file."""
    module = "transformer.blocks.0.attn1.to_q"
    matrices = {"lora_A": np.ones((2, 8), np.float32), "lora_B": np.ones((8, 2), np.float32)}
    tensors = {f"{module}.{side}.weight": matrix for side, matrix in matrices.items()}
    save_file(tensors, tmp_path / "lora.safetensors", metadata={"lora_alpha": "4"})
    for form in ("diffusers", "comfyui"):
        words = ["--lora_path", str(tmp_path / "lora.safetensors"), "--form", form]
        words += ["--output_dir", str(tmp_path / form)]
        code, output, imported = program(
            "scripts.export", *words, preload="hyvideo.loading.saved_policy"
        )
        assert (code, imported) == (0, ["torch"]), output
        assert (tmp_path / form / "pytorch_lora_weights.safetensors").is_file()


def test_a_plan_for_a_machine_without_weights_is_printed_without_torch():
    flags = ["--config", "configs/wan21_1gpu_nft.yaml", "--gpu", "RTX 4090", "--print_config"]
    code, output, imported = program("post_train", *flags)
    assert (code, imported) == (0, [])
    assert "missing on this host" in output and "whole run" in output
