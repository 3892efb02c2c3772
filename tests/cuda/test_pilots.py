"""Pilots of shipped recipes by post_train.py, with random weights of the released sizes and a limit
on the memory.
"""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import yaml

from hyvideo.data.prompts import read_requests, write_requests
from hyvideo.records.metrics_file import read_metrics
from hyvideo.rewards import tiny as tiny_rewards
from tests.conftest import ROOT
from tests.cuda import full_width
from tests.cuda.recipes import recipe
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
# GiB that torch reports for an RTX 4090.
GPU_24GB = 23.65
# Fewer rollouts and steps than the recipe: peak memory does not depend on them, if there is a batch
# for each update.
SHORTER = {
    "wan21_1gpu_nft": {},
    "wan21_1gpu_sage": {"grpo_sampling_steps": 4, "sde_window": "fixed:0:2"},
    "wan21_1gpu_draft": {},
    "wan22_a14b_1gpu_24gb": {
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        # the LoRA files of the student of four steps
        "base_lora_path": "",
        "low_noise_base_lora_path": "",
    },
    "hunyuanvideo15_1gpu_24gb": {
        "batch_size": 2,
        "num_generations": 2,
        "grpo_sampling_steps": 4,
        "nft_levels": 2,
    },
}
# Fewer blocks of the released width. The other pilots have all, and measure the memory of a run.
NUM_LAYERS = {"wan21_1gpu_sage": 6, "wan21_1gpu_draft": 6, "wan22_a14b_1gpu_24gb": 2}
TINY_VIDEO = {"sample_n_frames": 5, "height": 32, "width": 48}
TINY = {
    "wan21_1gpu_nft": {"batch_size": 4, "num_generations": 2},
    "wan21_1gpu_sage": {"batch_size": 4, "num_generations": 2},
    "wan21_1gpu_draft": {"batch_size": 4, "num_generations": 2},
    "wan22_a14b_1gpu_24gb": {},
    "hunyuanvideo15_1gpu_24gb": {"vae_dtype": "bf16"},
}
NUM_PROMPTS = 4
ALWAYS = {
    "random_weights": True,
    # velocities of random weights are no better than zero, which fails this check of nft
    "gate_interval": 0,
    "log_video_interval": 0,
    "report": False,
    "report_to": ["none"],
}


def limit_memory(gib):
    """Let torch allocate as much as on a smaller GPU."""
    if DEVICE.type == "cuda":
        fraction = gib * 2**30 / torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)


@pytest.mark.parametrize("name", SHORTER)
def test_pilot(tmp_path, record, name):
    """Records the metrics of the second iteration and the peak memory; prints the table of the
    pilot.
    """
    config = recipe(name).config
    version = config.model.transformer_version
    requests = read_requests(*config.data.prompts_csv)[:NUM_PROMPTS]
    write_requests(tmp_path / "prompts.csv", requests)
    prompts = [request.prompt for request in requests]
    layers = NUM_LAYERS.get(name)
    folder = tmp_path / "checkpoints"
    full_width.write(folder, version, prompts, is_tiny=IS_TINY, num_layers=layers)
    tiny_rewards.write("videoalign", tmp_path / "videoalign")
    settings = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    settings |= ALWAYS | SHORTER[name]
    settings["pretrained_model_root"] = str(folder)
    settings["prompts_csv"] = str(tmp_path / "prompts.csv")
    settings["output_dir"] = str(tmp_path / "run")
    # in bf16, scores would be equal
    scorer = {"path": str(tmp_path / "videoalign"), "precision": "fp32_math"}
    settings["reward_config"] = json.dumps({"videoalign": scorer})
    settings["device"] = DEVICE.type
    if IS_TINY:
        settings |= TINY_VIDEO | TINY[name]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    python = os.environ.get("CHECK_PYTHON", sys.executable)
    program = "import tests.cuda.test_pilots as t; t.limit_memory(t.GPU_24GB); import post_train; post_train.main()"
    command = [python, "-c", program, "--config", str(tmp_path / "settings.yaml"), "--pilot"]
    file = tmp_path / "run-pilot" / "metrics.jsonl"
    output: list[str] = []
    metrics: list[dict] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:  # the progress of each stage
            print(line, end="", flush=True)
            output.append(line)
            record({"seconds so far": time.perf_counter() - start})
            if file.is_file() and len(found := read_metrics(file)) > len(metrics):
                metrics = found
                record({f"iteration {len(metrics)}, s": metrics[-1]["time/iteration"]})
    assert process.returncode == 0, "".join(output[-3:])
    metrics = read_metrics(file)
    record(
        {key: value for key, value in metrics[-1].items() if key.startswith(("time/", "memory/"))}
    )
    # a CPU measures no stages
    update = metrics[-1].get("memory/update_gib", metrics[-1]["memory/peak_gib"])
    record({"GiB of the update": update})
    assert len(metrics) == 2 and metrics[-1].get("update/skipped", 0) == 0
    assert any("pilot: iteration 2 on" in line for line in output)
    if torch.device(DEVICE).type == "cuda":
        assert metrics[-1]["memory/peak_reserved_gib"] <= GPU_24GB
