"""generate.py --keep_latents: the latents beside a video are those that it was decoded from."""

from dataclasses import replace
from pathlib import Path

import torch

import generate
from hyvideo.data.video_files import ClipForm
from hyvideo.data.videos import at_original_size, read_video, to_uint8
from hyvideo.loading.model_setup import vae_weights
from hyvideo.loading.video_latents import VideoLatents
from hyvideo.models.decoding import decode
from hyvideo.models.family import family_of
from hyvideo.models.loading import load_vae
from hyvideo.settings.command_line import load_config
from tests.forked import ROOT

FLAGS = [
    "--config",
    "configs/miniature.yaml",
    "--prompt",
    "a red circle moves up",
    "--num_inference_steps",
    "2",
    "--num_threads",
    "1",
]


def test_latents_are_written_with_the_video_and_deleted_with_it(tmp_path, exit_code):
    video = tmp_path / "0000.mp4"
    assert exit_code(generate.main, *FLAGS, "--keep_latents", "--output_path", tmp_path) == 0
    form = ClipForm(9, 32, 32, 8)

    def of_vae(weights, form=form):
        return VideoLatents(
            tmp_path / "run", [video], form=form, vae_weights=weights, vae_identity=""
        )

    own = vae_weights(load_config("configs/miniature.yaml").model)
    latents = of_vae(own)
    assert latents.files[video] == video.with_suffix(".safetensors")
    # a run of another model, or of fewer frames, encodes the video
    other = vae_weights(load_config("configs/miniature_wan.yaml").model)
    assert other != own and of_vae(other).files[video].parent == tmp_path / "run/latents"
    assert of_vae(own, replace(form, frames=5)).files[video].parent == tmp_path / "run/latents"
    found = latents.read(video)
    vae = load_vae(ROOT / "assets/miniature", dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        decoded = decode(vae, family_of(vae).latents(vae.config).unscaled(found[None]))
    pixels = to_uint8(decoded[0].transpose(0, 1))
    shown = at_original_size(read_video(video)[0], 32, 32)
    assert (pixels.int() - shown.int()).abs().float().mean() < 4  # H.264
    assert exit_code(generate.main, *FLAGS, "--seed", "1", "--output_path", tmp_path) == 0
    assert not Path(video).with_suffix(".safetensors").exists()
