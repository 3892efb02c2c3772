"""One video sampled and decoded by several gloo processes, against one process."""

import json
import sys

import pytest
import torch

import generate
from hyvideo.data import images
from hyvideo.generation import video_sampler
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.settings import processes
from tests.distributed.launch import launch
from tests.generation.test_offloading import hunyuan, wan
from tests.generation.test_super_resolution import TINY
from tests.tiny_checkpoint import write_super_resolution

SMALL = (
    "--height 48 --width 80 --video_length 5 --num_inference_steps 2 --device cpu --seed 3 "
    "--guidance_scale 6"
)
SMALL += " --dtype fp32 --vae_tile_size 32"


def run(arguments, out):
    """Run generate.py in this process; save the latents and pixels of its videos, and the files
    that it wrote.
    """
    decode, write, kept, written = GRPOPipeline.decode, video_sampler.write_video, [], []

    def keep(self, latents):
        (frames,) = decode(self, latents)
        kept.append((latents, frames))
        return [frames]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOPipeline, "decode", keep)
        patch.setattr(
            video_sampler,
            "write_video",
            lambda path, *video: written.append(path.name) or write(path, *video),
        )
        patch.setattr(sys, "argv", ["generate.py", *arguments])
        for name, side in TINY.items():
            patch.setitem(images.RESOLUTIONS, name, side)
        assert generate.main() == 0
    torch.save(kept, f"{out}-{processes.rank()}.pt")
    return written


# Two replicas of two ranks, one video each; and one replica with a LoRA, an image, super-resolution
# and offloading.
@pytest.mark.system
@pytest.mark.parametrize(
    "family, num_processes, flags, prompts",
    [
        pytest.param(wan, 4, [], ["one", "two"], marks=pytest.mark.slow),
        (hunyuan, 2, ["--offloading", "group"], ["one"]),
    ],
)
def test_processes_share_a_video_and_one_writes_it(
    tmp_path, monkeypatch, family, num_processes, flags, prompts
):
    arguments = [*map(str, family(tmp_path, monkeypatch)), *SMALL.split(), "--prompt", *prompts]
    if family is hunyuan:
        write_super_resolution(tmp_path / "ckpts")
        arguments.append("--sr=true")
    run([*arguments, "--output_path", str(tmp_path / "one")], tmp_path / "one")
    shared = [*arguments, *flags, "--sp_size", "2", "--output_path", str(tmp_path / "shared")]
    written = launch(
        "tests.generation.test_shared_generation:run",
        num_processes,
        shared,
        str(tmp_path / "shared"),
    )
    assert written == [
        [] if rank % 2 else [f"{rank // 2:04d}.mp4"] for rank in range(num_processes)
    ]
    expected = torch.load(tmp_path / "one-0.pt")
    for rank in range(num_processes):
        ((latents, pixels),) = torch.load(tmp_path / f"shared-{rank}.pt")
        number = rank // 2
        # Matrix products of fewer tokens may round differently.
        torch.testing.assert_close(latents, expected[number][0], rtol=1e-5, atol=1e-5)
        assert (pixels.float() - expected[number][1].float()).abs().max() <= 1
    for number in range(len(prompts)):
        one, two = (
            json.loads((tmp_path / name / f"{number:04d}.json").read_text())
            for name in ("one", "shared")
        )
        assert (one.pop("sp_size"), two.pop("sp_size")) == (1, 2)
        assert one == two or flags
