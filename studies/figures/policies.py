"""Videos of several policies for the same prompts and seeds, like figures 6 and 10 to 12 of the
paper.

    <out>/<policy>/0000.mp4, 0000.json    videos of each policy, as written by generate.py
    <out>/policies.png                    a row for each prompt with frames of each policy
    <out>/policies.webp                   the same as a moving picture
"""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from hyvideo.data.prompts import Request
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.files.run_folder import Lease
from hyvideo.generation.generation import list_videos, make_and_read_requests
from hyvideo.generation.generator import Generator
from hyvideo.generation.settings import GenerationSettings
from hyvideo.loading.model_setup import choose_device
from hyvideo.records.contact_sheet import contact_sheet, read_sheet_frames
from hyvideo.records.progress_bar import print_stage
from hyvideo.records.run_files import evenly_spaced
from hyvideo.settings import processes
from hyvideo.settings.config import Config
from studies.figures.moving_picture import moving_picture, read_clip
from studies.figures.named_policies import Policies

SHEET = "policies.png"
PICTURE = "policies.webp"


def compare(
    config: Config, policies: Policies, *, prompts: list[str], num_prompts: int, out: Path
) -> None:
    """Sample policies and draw their contact sheet; the processes of torchrun share the videos.

    Without ``prompts``, ``num_prompts`` rows of valid_video_csv are used.
    """
    if prompts:
        requests = make_and_read_requests(prompts, [])
    else:
        requests = make_and_read_requests([], config.data.valid_video_csv)
        requests = [requests[row] for row in evenly_spaced(num_prompts, len(requests))]
    sample_policies(config, policies, requests, out, only_checks=True)
    device = choose_device(config.model.device, processes.local_rank())
    mesh = ranks.start(1, device, timeout=ranks.UNEVEN_WORK_TIMEOUT)
    # from two calls, the image would mix the videos
    with Lease(out) if mesh.is_main else nullcontext():
        sample_policies(config, policies, requests, out)
        barrier(mesh)
        if mesh.is_main:
            print(
                f"wrote {draw_policies(policies, requests, out, config.validation.validation_seed)}"
            )
            print(f"wrote {move_policies(policies, requests, out)}")
    ranks.stop()


def sample_policies(
    config: Config,
    policies: Policies,
    requests: list[Request],
    out: Path,
    *,
    only_checks: bool = False,
) -> None:
    """Generate the videos of one policy after the other. Raises ValueError as `Generator` does."""
    for name, (source, sampling) in policies.items():
        sizes = dict.fromkeys(requests, (sampling.height, sampling.width))
        recipe = GenerationSettings(
            config,
            sampling,
            source,
            seed=config.validation.validation_seed,
        )
        generator = Generator(recipe, list_videos(sizes, requests, out / name))
        if not only_checks:
            print_stage(f"videos of {name}")
            generator.make()


def draw_policies(policies: Iterable[str], requests: list[Request], out: Path, seed: int) -> Path:
    """Write the contact sheet of the videos and return its path."""
    files = [f"{number:04d}.mp4" for number in range(len(requests))]
    frames = {name: [read_sheet_frames(out / name / file) for file in files] for name in policies}
    captions = [f"seed {seed}, video {number}" for number in range(len(requests))]
    contact_sheet(out / SHEET, [request.prompt for request in requests], frames, captions)
    return out / SHEET


def move_policies(policies: Policies, requests: list[Request], out: Path) -> Path:
    """Write the moving picture of the videos and return its path."""
    clips = {}
    for name, (_, sampling) in policies.items():
        size = (sampling.height, sampling.width)
        files = [out / name / f"{number:04d}.mp4" for number in range(len(requests))]
        clips[name.replace("_", " ")] = [read_clip(file, *size) for file in files]
    (_, sampling), *_ = policies.values()
    prompts = [request.prompt for request in requests]
    moving_picture(out / PICTURE, prompts, clips, fps=sampling.fps)
    return out / PICTURE
