"""Videos of several policies for the same prompts and seeds, like figures 6 and 10 to 12 of the
paper.

    <out>/<policy>/0000.mp4, 0000.json    videos of each policy, as written by generate.py
    <out>/policies.png                    a row for each prompt with frames of each policy
    <out>/policies.webp                   the same as a moving picture
"""

import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hyvideo.checkpoints.format import complete
from hyvideo.data.prompts import Request
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.files.run_folder import Lease
from hyvideo.files.text import quote
from hyvideo.generation.generation import Source, list_videos, make_and_read_requests
from hyvideo.generation.generator import Generator
from hyvideo.generation.settings import GenerationSettings
from hyvideo.loading.model_setup import choose_device
from hyvideo.models.lora_files import LORA_FILES
from hyvideo.records.contact_sheet import contact_sheet, read_sheet_frames
from hyvideo.records.run_files import evenly_spaced
from hyvideo.settings import processes
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling
from studies.figures.moving_picture import moving_picture, read_clip

BASE = "base"
SHEET = "policies.png"
PICTURE = "policies.webp"
Policies = dict[str, tuple[Source, Sampling]]  # by name


def read_policies(words: list[str], sampling: Sampling) -> Policies:
    """Parse policies given as ``base`` or ``name=path`` (see `source_of`).

    Raises ValueError for invalid words.

    A suffix such as ``@6`` sets the guidance scale of a policy's settings, and ``@4steps`` its
    number of steps. Suffixes are part of its name.
    """
    policies: Policies = {}
    for word in words:
        pattern = r"(.*?)((?:@(\d+(?:\.\d+)?))?(?:@(\d+)steps)?)"
        plain, suffix, scale, steps = re.fullmatch(pattern, word, re.DOTALL).groups("")
        name, has_path, path = plain.partition("=")
        if not has_path and name != BASE:
            raise ValueError(f"a policy must be `{BASE}` or `name=path`, got {quote(word)}")
        if name + suffix in policies:
            raise ValueError(f"policies need different names, got {quote(name + suffix)} twice")
        source = source_of(Path(path)) if has_path else Source()
        of_policy = sampling
        if scale:  # of two experts, for both
            guidance = float(scale)
            of_policy = replace(
                sampling, guidance_scale=guidance, low_noise_guidance_scale=guidance
            )
        if steps:
            of_policy = replace(of_policy, steps=int(steps))
        policies[name + suffix] = (source, of_policy)
    return policies


def source_of(path: Path) -> Source:
    """Return the policy of a LoRA file or folder, of a checkpoint, or of a run (its newest
    checkpoint).
    """
    if not path.exists():
        raise ValueError(
            f"a policy must be a run, a checkpoint or a LoRA, got {quote(path)}: it does not exist"
        )
    if path.is_file() or any((path / name).is_file() for name in LORA_FILES):
        return Source(lora=path)
    checkpoints = complete(path)
    return Source(checkpoints[-1] if checkpoints else path)


def compare(
    config: Config, words: list[str], *, prompts: list[str], num_prompts: int, out: Path
) -> None:
    """Sample the policies ``words`` (see `read_policies`) and draw their contact sheet; the
    processes of torchrun share the videos.

    Without ``prompts``, ``num_prompts`` rows of valid_video_csv are used.
    """
    if prompts:
        requests = make_and_read_requests(prompts, None, [])
    else:
        requests = make_and_read_requests([], None, config.data.valid_video_csv)
        requests = [requests[row] for row in evenly_spaced(num_prompts, len(requests))]
    policies = read_policies(words, config.validation_sampling)
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
