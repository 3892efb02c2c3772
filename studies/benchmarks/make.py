"""Make the videos of a benchmark for several policies; the processes of torchrun share them."""

from pathlib import Path

from hyvideo.data.prompts import read_requests
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.settings import processes
from hyvideo.settings.config import Config
from hyvideo.settings.rules import check_sampling
from hyvideo.training.model_setup import choose_device
from studies.benchmarks.make_text import command_lines, plan_lines
from studies.benchmarks.videos import BenchmarkVideos, list_clips, read_list
from studies.figures.policies import read_policies


def make_all(
    config: Config,
    prompts: Path,
    words: list[str],
    out: Path,
    *,
    dimensions: list[str],
    videos_per_prompt: int | None,
    is_official: bool,
    augmented: str | None,
    dry_run: bool,
) -> None:
    """Make the videos that are missing below ``out``, and print the commands of the official tool.

    ``words`` are policies (see `read_policies`), ``augmented`` is a CSV of rewritten prompts. With
    ``dry_run``, only print the number of videos. Raises ValueError for input that cannot be used,
    before the first video is made.
    """
    sampling = config.validation_sampling
    model = config.model
    check_sampling(
        sampling,
        root=model.pretrained_model_root,
        version=model.transformer_version,
        output=out,
    )
    suite, rows = read_list(prompts, dimensions, is_official=is_official)
    requests = read_requests(augmented) if augmented else []
    clips = list_clips(
        suite,
        rows,
        {request.original_prompt or request.prompt: request.prompt for request in requests},
        seed=config.record.validation_seed,
        num_videos=videos_per_prompt,
    )
    lora = config.optimizer.pretrained_lora_path
    policies = []
    for name, (source, of_policy) in read_policies(words, sampling).items():
        source = source.with_initial_lora(lora)
        policies.append(BenchmarkVideos(config, of_policy, source, clips, out / name))
    pending = [policy.pending() for policy in policies]
    for policy, videos in zip(policies, pending):
        policy.make(videos, only_checks=True)
    if processes.rank() == 0:
        num_pending = [len(videos) for videos in pending]
        lines = plan_lines(suite, rows, policies, num_pending, config.data, videos_per_prompt)
        print("\n".join(lines))
    if dry_run:
        return
    device = choose_device(config.model.device, processes.local_rank())
    mesh = ranks.start(1, device, timeout=ranks.UNEVEN_WORK_TIMEOUT)
    barrier(mesh)  # all processes must list the same videos before the first one is made
    for policy, videos in zip(policies, pending):
        policy.make(videos)
    barrier(mesh)
    if mesh.is_main:
        for policy in policies:
            policy.link()
        lines = command_lines(suite, rows, policies, config.data, prompts=prompts, out=out)
        print("\n".join(lines))
    ranks.stop()
