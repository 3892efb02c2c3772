"""What generate.py makes is what the library samples from the settings in its record."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import generate
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.loading import model_setup, saved_policy
from hyvideo.models.family import prepare
from hyvideo.models.guidance import Guidance, parse_interval
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, SamplerSettings
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import levels_of_steps
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from tests.forked import ROOT
from tests.shallow import write_trained
from tests.test_trainer import Redness

CPU = torch.device("cpu")
PROMPT = "a red circle moves up"
SIGMAS = "1,0.9,0.55,0.2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of all weights, with an EMA."""
    folder = tmp_path_factory.mktemp("trained")
    config = load_config(
        str(ROOT / "configs/smoke.yaml"),
        pretrained_model_root=write_trained(folder / "ckpts"),
        output_dir=str(folder / "run"),
        prompts_csv=[str(ROOT / "assets/miniature/prompts/train.csv")],
        valid_video_csv="",
        random_weights=False,
        num_threads=1,
        learning_rate=1e-2,
        ema_decay=0.5,
        max_steps=1,
        cfg_scale=2.0,
        negative_prompt="blurry",
        guidance_interval="0.3:0.95",
        batched_forward=False,
        validation_shift=4.0,
        log_video_interval=0,
        report=False,
        report_to=["none"],
    )
    Trainer(config, Mesh.single(), CPU, scorers={"test": Redness()}).train()
    return folder / "run" / "checkpoints" / "000001"


def latents_of_the_library(record, config, transformer):
    """Return the latents that the functions of the library sample from a record."""
    encoder, vae = model_setup.load_encoder(config, CPU)
    prepare(transformer.eval(), [])
    request, negative = (
        Request(record["prompt"]),
        Request(record["negative_prompt"] or "", is_negative=True),
    )
    pipeline = GRPOPipeline(
        transformer,
        vae,
        sampling=SamplerSettings(
            Guidance(
                record["guidance_scale"], interval=parse_interval(record["guidance_interval"])
            ),
            batched_forward=config.rollout.batched_forward == "true",
        ),
        negative=encoder([negative]).samples[0],
    )
    shape = pipeline.latent_shape(record["frames"], record["height"], record["width"])
    noise = normal(shape, record["seed"], "generate", record["number"])
    schedule = Schedule.at(levels_of_steps(record["steps"], record["shift"], record["sigmas"]))
    return pipeline.sample_ode(encoder([request]), noise[None], schedule)[0]


@pytest.mark.parametrize(
    "flags",
    [
        ("--sigmas", SIGMAS),
        pytest.param(
            ("--shift", "6", "--num_inference_steps", "3", "--guidance_scale", "1"),
            marks=pytest.mark.system,
        ),
        pytest.param(("--guidance_scale", "3"), marks=pytest.mark.system),
    ],
    ids=["levels", "shift", "guidance"],
)
def test_the_latents_of_the_program_are_those_that_its_record_describes(
    checkpoint, flags, tmp_path, monkeypatch
):
    words = ["--checkpoint_path", checkpoint, "--prompt", "a blue square moves down", PROMPT]
    words += [
        "--seed",
        "5",
        "--keep_latents",
        "--device",
        "cpu",
        "--output_path",
        tmp_path / "videos",
        *flags,
    ]
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
    assert generate.main() == 0
    record = json.loads((tmp_path / "videos" / "0001.json").read_text())
    assert (record["prompt"], record["number"], record["seed"]) == (PROMPT, 1, 5)
    assert record["sigmas"] == (SIGMAS if "--sigmas" in flags else record["sigmas"])
    (found,) = load_file(tmp_path / "videos" / "0001.safetensors").values()
    config = load_config(checkpoint.parent.parent / "config.yaml")
    expected = latents_of_the_library(record, config, saved_policy.load(checkpoint, torch.float32))
    assert torch.equal(found, expected)
