"""Every limit of the project is at least twice what the largest shipped recipe needs;
docs/limits.md lists them.

The needs are computed from configs/, the shipped prompts, `versions.yaml` and the planner.
"""

import ast
import dataclasses
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import yaml

import generate
from hyvideo.config import all_settings, command_line
from hyvideo.config.config import Config
from hyvideo.data import images, prompts
from hyvideo.data.prompts import read_requests
from hyvideo.data.text import MAX_PROMPT_BYTES
from hyvideo.distributed import mesh
from hyvideo.models.sizes import read_architecture
from hyvideo.models.versions import RELEASED, SUPER_RESOLUTION, version_defaults
from hyvideo.pipelines.condition_encoder import MAX_CACHE_BYTES
from hyvideo.planning.cost import COMPILATION, duration, validation_seconds, video_seconds
from hyvideo.planning.disk import checkpoint_bytes
from hyvideo.planning.hardware import SLOWER
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.report import clips as report_clips
from hyvideo.rewards.prompt_checks import MAX_CHECKS
from hyvideo.rewards.service import client, protocol
from hyvideo.rewards.service.limits import MAX_WAITING, Limits
from hyvideo.rewards.videoalign import preprocessing
from studies.preference import rating
from tests.config.test_shipped_configs import num_gpus
from tests.forked import ROOT

PAGE = ROOT / "docs/limits.md"
MARGIN = 2  # limit / need
SHARED_DISK, LOCAL_DISK = 0.5e9, 2e9  # bytes per second that all processes write together
NETWORK = 125e6  # bytes per second to a reward service: 1 Gbit/s
NUM_POLICIES = 5  # of figure 6 in docs/reproduce.md
GPUS_PER_SERVICE = 8
TEXT_TOKENS = PlannedRun.text_tokens
TOKEN_BYTES = 200  # of a token with its probability in an answer in JSON

CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/paper/*.yaml")])


@cache
def configs() -> dict[str, Config]:
    return {path.stem: command_line.parse(["--config", str(path)]).config for path in CONFIGS}


@cache
def runs() -> dict[str, PlannedRun]:
    """Return the recipes for GPUs on A100s, whose rate is the lowest for which hours are
    printed.
    """
    hardware, found = SLOWER, {}
    for path in CONFIGS:
        config = configs()[path.stem]
        if config.model.device != "cpu":
            architecture = read_architecture("ckpts", config.model.transformer_version)
            found[path.stem] = PlannedRun(config, num_gpus(path), architecture, hardware=hardware)
    return found


@cache
def clips() -> dict[str, tuple[int, int, int]]:
    """Return the videos of the recipes, by recipe: (frames, height, width) of rollouts and of
    validation.
    """
    sizes = {}
    for name, config in configs().items():
        sizes[f"a rollout of {name}"] = config.rollout_size
        sizes[f"validation of {name}"] = config.validation_size
    return sizes


@cache
def released_clips() -> dict[str, tuple[int, int, int]]:
    """Return the largest video of each released version and super-resolution model."""
    found = {}
    for name, version in (RELEASED | SUPER_RESOLUTION).items():
        sizes = version.sizes or images.bucket_sizes(version.resolution)
        found[name] = (version.num_frames, *max(sizes, key=math.prod))
    return found


@cache
def texts() -> dict[str, list[str]]:
    """Return the shipped prompts by file."""
    files = {
        file for c in configs().values() for file in (*c.data.prompts_csv, *c.data.valid_video_csv)
    }
    return {file: [request.prompt for request in read_requests(file)] for file in sorted(files)}


def largest(needs: dict[str, float]) -> tuple[float, str]:
    """Return the largest need and what has it."""
    name = max(needs, key=lambda name: needs[name])
    return needs[name], name


def clip_bytes(size: tuple[int, int, int]) -> int:
    return 3 * math.prod(size)


@dataclass(frozen=True)
class Row:
    name: str  # of the limit on the page
    constant: str  # module:NAME, or a flag
    limit: float
    need: tuple[float, str]  # the largest one, and what has it
    unit: str
    change: str = ""  # what a user can set


def setting(name: str) -> float:
    return Config().flat()[name]


def texts_and_files() -> list[Row]:
    longest = {file: max(len(text.encode()) for text in found) for file, found in texts().items()}
    files = {file: Path(ROOT / file).stat().st_size for file in texts()}
    settings = {path.stem: path.stat().st_size for path in CONFIGS}
    side = {name: max(size[1:]) for name, size in (clips() | released_clips()).items()}
    frames = {name: size[0] for name, size in (clips() | released_clips()).items()}
    frame = {name: math.prod(size[1:]) for name, size in released_clips().items()}
    raw = {name: 3 * pixels for name, pixels in frame.items()}
    steps = {name: config.record.validation_steps for name, config in configs().items()}
    steps |= {name: config.rollout.grpo_sampling_steps for name, config in configs().items()}
    steps |= {name: version.num_steps for name, version in RELEASED.items()}
    rows = {file: len(found) for file, found in texts().items()}
    cached = {
        name: (len(texts_of(run.config)) + run.plan.groups)
        * TEXT_TOKENS
        * run.architecture.text_width
        * 2
        for name, run in runs().items()
    }
    # Of each validation video there is one of the base model and one of the last iteration.
    shown = {
        name: 2
        * config.record.log_num_videos
        * (report_clips.MIN_SHARE + report_clips.MAX_POSTER_BYTES)
        for name, config in configs().items()
    }
    answer = {"token": "x" * 22, "answers": {"x" * 20: dict.fromkeys(questions(), "both_bad")}}
    return [
        Row(
            "a prompt",
            "hyvideo.data.text:MAX_PROMPT_BYTES",
            MAX_PROMPT_BYTES,
            largest(longest),
            "bytes",
        ),
        Row(
            "a CSV of prompts",
            "hyvideo.data.prompts:MAX_CSV_BYTES",
            prompts.MAX_CSV_BYTES,
            largest(files),
            "bytes",
        ),
        Row(
            "videos per prompt of `generate.py`",
            "generate:MAX_VIDEOS",
            generate.MAX_VIDEOS,
            largest(rows),
            "",
        ),
        Row(
            "a config",
            "hyvideo.config.command_line:MAX_BYTES",
            command_line.MAX_BYTES,
            largest(settings),
            "bytes",
        ),
        Row(
            "side of a video",
            "hyvideo.config.all_settings:MAX_SIDE",
            all_settings.MAX_SIDE,
            largest(side),
            "pixels",
        ),
        Row(
            "side of `generate.py`",
            "generate:MAX_SIDE",
            generate.MAX_SIDE,
            largest(side),
            "pixels",
        ),
        Row(
            "length of a video",
            "hyvideo.config.all_settings:MAX_FRAMES",
            all_settings.MAX_FRAMES,
            largest(frames),
            "frames",
        ),
        Row(
            "denoising steps",
            "hyvideo.config.all_settings:MAX_STEPS",
            all_settings.MAX_STEPS,
            largest(steps),
            "",
        ),
        Row(
            "file of an image",
            "hyvideo.data.images:MAX_BYTES",
            images.MAX_BYTES,
            largest(raw),
            "bytes",
        ),
        Row(
            "pixels of an image",
            "hyvideo.data.images:MAX_PIXELS",
            images.MAX_PIXELS,
            largest(frame),
            "pixels",
        ),
        Row(
            "encoded prompts in memory, without `precompute_conditions`",
            "hyvideo.pipelines.condition_encoder:MAX_CACHE_BYTES",
            MAX_CACHE_BYTES,
            largest(cached),
            "bytes",
            "`precompute_conditions`",
        ),
        Row(
            "checks of a prompt",
            "hyvideo.rewards.prompt_checks:MAX_CHECKS",
            MAX_CHECKS,
            (5, "the instruction"),
            "",
        ),
        Row(
            "videos in a report, at least 0.1 MB for each preview",
            "hyvideo.report.clips:MAX_CLIP_BYTES",
            report_clips.MAX_CLIP_BYTES,
            largest(shown),
            "bytes",
            "`log_num_videos`",
        ),
        Row(
            "a rater's answer",
            "studies.preference.rating:MAX_BODY",
            rating.MAX_BODY,
            (len(json.dumps(answer)), "a pair"),
            "bytes",
        ),
    ]


def texts_of(config: Config) -> list[str]:
    return [text for file in config.data.valid_video_csv for text in texts()[file]]


def questions() -> dict:
    return json.loads((ROOT / "studies/preference/questions.json").read_text())


def rewards() -> list[Row]:
    limits, scorer = Limits(), client.RemoteScorer(["http://127.0.0.1:1"])
    clip = {name: clip_bytes(size) for name, size in (clips() | released_clips()).items()}
    recipe = {name: clip_bytes(size) for name, size in clips().items()}
    frames = {name: size[0] for name, size in (clips() | released_clips()).items()}
    frame = {name: math.prod(size[1:]) for name, size in released_clips().items()}
    seconds = {name: version.num_frames / version.fps for name, version in RELEASED.items()}
    gpus = {name: run.world_size for name, run in runs().items()}
    length, file = largest(
        {file: max(len(json.dumps(text)) for text in found) for file, found in texts().items()}
    )
    all_prompts = {file: len(json.dumps({"prompts": found})) for file, found in texts().items()}
    batch, name = largest(recipe)
    queue = {name: queue_seconds(run, scorer) for name, run in runs().items()}
    return [
        Row(
            "videos of a request",
            "Limits:videos",
            limits.videos,
            (scorer.max_videos, "a client's request"),
            "",
        ),
        Row("a request", "Limits:body", limits.body, largest(clip), "bytes"),
        Row("frames of a video", "Limits:frames", limits.frames, largest(frames), ""),
        Row("pixels of a frame", "Limits:pixels", limits.pixels, largest(frame), "pixels"),
        Row(
            "header of a request",
            "hyvideo.rewards.service.protocol:_MAX_HEADER",
            protocol._MAX_HEADER,
            (scorer.max_videos * 2 * length, f"{scorer.max_videos} prompts of {file}"),
            "bytes",
        ),
        Row(
            "prompts that are checked at the start",
            "Limits:prompts",
            limits.prompts,
            largest(all_prompts),
            "bytes",
        ),
        Row(
            "requests in memory",
            "Limits:memory",
            limits.memory,
            (scorer.max_videos * batch, f"{scorer.max_videos} videos, {name}"),
            "bytes",
        ),
        Row(
            "active requests",
            "hyvideo.rewards.service.limits:MAX_WAITING",
            MAX_WAITING,
            largest(gpus),
            "",
            "`--max_waiting` of the server",
        ),
        Row("connections", "Limits:connections", limits.connections, largest(gpus), ""),
        Row(
            f"wait for the scores of a request, with {GPUS_PER_SERVICE} GPUs per service",
            "remote_reward_timeout",
            setting("remote_reward_timeout"),
            largest(queue),
            "s",
            "`remote_reward_timeout`",
        ),
        Row(
            "answer of a service or a judge",
            "hyvideo.rewards.service.client:MAX_ANSWER",
            client.MAX_ANSWER,
            largest({path.stem: answer_bytes(path) for path in judges()}),
            "bytes",
        ),
        Row(
            "frames that VideoAlign samples",
            "hyvideo.rewards.videoalign.preprocessing:MAX_FRAMES",
            preprocessing.MAX_FRAMES,
            largest({name: 2 * length for name, length in seconds.items()}),
            "",
        ),
    ]


def queue_seconds(run: PlannedRun, scorer: client.RemoteScorer) -> float:
    """Return the seconds until the last of one request per GPU is sent and its videos are
    scored.
    """
    if "videoalign" not in run.config.reward.reward_model:
        return 0.0
    clip = clip_bytes(run.config.validation_size)
    videos = max(1, min(scorer.max_videos, scorer.max_bytes // clip))
    scoring = video_seconds(run.validation or run)[1]
    return GPUS_PER_SERVICE * videos * (clip / NETWORK + scoring)


def judges() -> list[Path]:
    return sorted((ROOT / "hyvideo/rewards").glob("*.yaml"))


def answer_bytes(rubric: Path) -> int:
    request = yaml.safe_load(rubric.read_text())["request"]
    return request["max_tokens"] * (1 + request.get("top_logprobs", 0)) * TOKEN_BYTES


def times() -> list[Row]:
    several = {name: run for name, run in runs().items() if run.world_size > 1}
    parts = {
        f"{part} of {name}": seconds
        for name, run in several.items()
        for part, seconds in run_parts(run).items()
    }
    stops = {name: stop_seconds(run) for name, run in runs().items()}
    scoring = {name: scoring_seconds(run) for name, run in several.items()}
    videos = {
        f"{NUM_POLICIES} videos of {name}": NUM_POLICIES * released_video_seconds(name)
        for name in RELEASED
        if version_defaults(name).task == "t2v"
    }
    launcher = (ROOT / "scripts/post_train/train_grpo.sh").read_text()
    return [
        Row(
            "wait of a rank for other ranks",
            "collective_timeout",
            setting("collective_timeout"),
            largest(parts),
            "s",
            "`collective_timeout`",
        ),
        Row(
            "time in one stage until the watchdog reports it",
            "watchdog_seconds",
            setting("watchdog_seconds"),
            largest(parts),
            "s",
            "`watchdog_seconds`",
        ),
        Row(
            "wait of several ranks for rewards",
            "reward_deadline",
            Config().distributed.reward_deadline,
            largest(scoring),
            "s",
            "`collective_timeout`",
        ),
        Row(
            "saving after a signal",
            "SHUTDOWN_TIMEOUT",
            float(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", launcher)[1]),
            largest(stops),
            "s",
            "`SHUTDOWN_TIMEOUT`",
        ),
        Row(
            "wait for the slowest process that generates videos",
            "hyvideo.distributed.mesh:UNEVEN_WORK_TIMEOUT",
            mesh.UNEVEN_WORK_TIMEOUT,
            largest(videos),
            "s",
        ),
    ]


def steps_and_passes(run: PlannedRun) -> dict[str, float]:
    """Return the seconds of the parts of an iteration and of a validation after which a run can
    stop.
    """
    settings, stages = run.settings, duration(run).stages
    batches = settings.gradient_accumulation_steps
    num_passes = run.backwards_per_update * settings.num_updates_per_rollout
    parts = {
        "a denoising step": stages["rollout"] / batches / settings.grpo_sampling_steps,
        "decoding a batch": stages["decode"] / batches,
        "an update pass": stages["update"] / num_passes,
    }
    if run.validation:
        sampling = run.validation.with_settings(gradient_accumulation_steps=1)
        stages = duration(sampling).stages
        parts["a denoising step of validation"] = (
            stages["rollout"] / sampling.settings.grpo_sampling_steps
        )
        parts["decoding a batch of validation"] = stages["decode"]
    return parts


def run_parts(run: PlannedRun) -> dict[str, float]:
    """Return the seconds between two collectives of a run, which are also those between two entries
    of a stage.
    """
    checkpoint = checkpoint_bytes(run) / SHARED_DISK
    return steps_and_passes(run) | {"a checkpoint": checkpoint, "compilation": COMPILATION}


def stop_seconds(run: PlannedRun) -> float:
    """Return the seconds from a signal until the checkpoint is written."""
    return max(steps_and_passes(run).values()) + checkpoint_bytes(run) / LOCAL_DISK


def scoring_seconds(run: PlannedRun) -> float:
    """Return the seconds to score an iteration's, or a validation's, videos of a rank."""
    videos = math.ceil(
        len(texts_of(run.config)) * run.settings.validation_repeats / run.plan.replicas
    )
    validation = videos * video_seconds(run.validation)[1] if run.validation else 0.0
    return max(validation, duration(run).stages["reward"])


def released_video_seconds(name: str) -> float:
    """Return the seconds of one video of a released version at its largest size, on one GPU."""
    frames, height, width = released_clips()[name]
    config = configs()["hunyuanvideo15_1gpu"].with_settings(
        transformer_version=name,
        validation_num_frames=frames,
        validation_height=height,
        validation_width=width,
        validation_steps=version_defaults(name).num_steps,
        validation_cfg_scale=version_defaults(name).guidance_scale,
    )
    run = PlannedRun(config, 1, read_architecture("ckpts", name), hardware=SLOWER)
    return validation_seconds(run, 1)


SECTIONS = {"Texts, files and sizes": texts_and_files, "Rewards": rewards, "Time": times}
HEAD = """# Limits

Which inputs are too large for a program, and when does a program stop waiting? Read this page if an error message names
a limit, or before you use much larger inputs than the shipped recipes.

- *Largest need* is what the shipped recipes and the released models need at most. Every limit is at least twice as
  large.
- *Needed by* names the recipe, model or file with the largest need.
- *Change* names the setting of the limit. If the cell is empty, the limit is a constant in the code.
"""
TAIL = """
**How the needs are computed.** Seconds are predicted for A100 GPUs. The file system writes checkpoints at 0.5 GB/s, or
at 2 GB/s for a process that saves after a signal. The network to a reward service has 1 Gbit/s.

`python -m pytest tests/test_limits.py --regenerate` computes this page from `configs/`, the shipped prompts,
`versions.yaml` of each family and the [planner](cost.md).
"""


def number(value: float, unit: str) -> str:
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit == "bytes" and value >= scale:
            return f"{float(f'{value / scale:.3g}'):g} {prefix}B"
    return f"{round(value) if value >= 10 else float(f'{value:.2g}'):,} {unit}".replace(
        ".0 ", " "
    ).rstrip()


def page() -> str:
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        parts.append(
            f"\n## {title}\n\n| limit on | value | largest need | needed by | change |\n"
            "|---|---|---|---|---|\n"
        )
        for row in rows():
            need, of = row.need
            cells = [row.name, number(row.limit, row.unit), number(need, row.unit), of, row.change]
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join([*parts, TAIL]).replace("|  |", "| |")


ROWS = [row for rows in SECTIONS.values() for row in rows()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.constant)
def test_a_limit_is_at_least_twice_the_largest_need(row):
    need, of = row.need
    assert row.limit >= MARGIN * need > 0, (
        f"{row.name}: {need:,.0f} {row.unit} for {of}, limit {row.limit:,.0f}"
    )


def test_the_page_of_limits_is_up_to_date(check_generated):
    check_generated(PAGE, page())


# Constants that look like limits, with the reason why the table does not have them.
OTHERS = {
    "generate:MAX_CANDIDATES": "the number of videos to choose from; a user may choose any",
    "hyvideo.config.machine_rules:MAX_LORA_BYTES": "only rejects what is not a file of weights",
    "hyvideo.config.machine_rules:MAX_STATE_BYTES": "state.json has a few kilobytes",
    "hyvideo.planning.length_text:MAX_VALIDATION_SHARE": "the share of a run, for a warning",
    "hyvideo.config.processes:_MAX_COMPILE_WORKERS": "torch's own",
    "hyvideo.config.all_settings:MAX_THREADS": "more than the cores of any machine",
    "hyvideo.config.run_plan:MAX_NOISE": "the sampler's, a number of the method",
    "hyvideo.models.attention_kernels:_MAX_CUDNN_HEAD_DIM": "of the kernels of cuDNN; above it, another one is used",
    "hyvideo.models.gpu_memory:LIMIT": "the name of an environment variable",
    "hyvideo.data.images:MAX_RATIO": "of the original's buckets",
    "hyvideo.data.run_folder:_MAX_BYTES": "a mark has a hundred bytes",
    "hyvideo.data.files:MAX_DIGITS": "of an integer that a float can hold",
    "hyvideo.data.text:MAX_MESSAGE": "shortens a message",
    "hyvideo.distributed.watchdog:BEATS_PER_LIMIT": "the watchdog's heartbeats",
    "hyvideo.distributed.parallelize:_RECOMPILE_LIMIT": "of torch.compile",
    "studies.benchmarks.videos:MAX_LIST_BYTES": "no list is shipped; those of VBench have a few megabytes",
    "studies.benchmarks.videos:MAX_NAME": "of the file system",
    "studies.preference.rating:MAX_SECONDS": "for a request of a few hundred bytes",
    "hyvideo.report.clips:MAX_POSTER_BYTES": "the encoder keeps to it",
    "hyvideo.report.clips:MAX_PREVIEW_BYTES": "the encoder keeps to it",
    "hyvideo.report.contents:MAX_NOTES_BYTES": "larger notes are named instead of shown",
    "hyvideo.report.contents:MAX_POINTS": "thins out curves",
    "hyvideo.report.page:MAX_DETAILED_RUNS": "a shorter list of videos",
    "hyvideo.training.reward_gradient:MAX_MISSING": "a share, the same at any size",
    "hyvideo.report.page:MAX_PAGE_BYTES": "the videos get the room that is left",
    "hyvideo.report.page:MAX_POINTS_OF_ALL": "thins out curves",
    "hyvideo.report.serve:MAX_CACHED_PAGES": "older pages are built again",
    "hyvideo.report.serve:MAX_DEPTH": "of folders; serve a folder further down",
    "hyvideo.grpo.advantages:MAX_ADVANTAGE": "a number of the method",
    "hyvideo.rewards.chat_endpoint:MAX_CONNECT_S": "for a connection, without data",
    "hyvideo.models.hunyuan_video15.prompt_encoders:MAX_GLYPH_TOKENS": "the model's; a longer text gives a warning",
    "hyvideo.models.hunyuan_video15.prompt_encoders:MAX_TEXT_TOKENS": "the model's; a longer text gives a warning",
    "hyvideo.rewards.prompt_rewriting:LIMITS": "options of the endpoint",
    "hyvideo.rewards.prompt_rewriting:MAX_SIDE": "images are resized to it",
    "hyvideo.rewards.judge_answers:MAX_TOTAL": "probabilities are at most 1",
    "hyvideo.config.command_line:MAX_WORLD_SIZE": "far above any cluster",
    "hyvideo.config.declaration:MAX_NUMBER": "no useful number is near it",
    "hyvideo.rewards.rewards:MAX_SCORE": "no score is near it",
    "hyvideo.rewards.service.client:MAX_REQUEST_BYTES": "divides a batch; a larger video is sent alone",
    "hyvideo.rewards.service.client:_CONTINUE_TIMEOUT": "the body is then sent without an answer",
    "hyvideo.records.contact_sheet:MAX_PROMPT_LINES": "shortens a caption",
    "hyvideo.training.output_folder:_MAX_NAMES": "shortens a message",
    "hyvideo.schedulers.transitions:MAX_ETA": "a number of the method",
}
OF_LIMITS = {"seconds", "rate"}  # of Limits: an upload may take 20 s and longer by 1 s per MiB


def constants() -> set[str]:
    """Return module:NAME of the constants that limit something, by their name."""
    found = set()
    for path in [
        ROOT / "generate.py",
        *ROOT.glob("hyvideo/**/*.py"),
        *ROOT.glob("studies/**/*.py"),
    ]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
            found |= {
                f"{module}:{name}"
                for name in names
                if re.match(r"_?MAX_|.*(LIMIT|LIMITS|TIMEOUT)$", name)
            }
    return found


def test_every_limit_is_in_the_table_or_has_a_reason_why_not():
    listed = {row.constant for row in ROWS}
    assert constants() - listed - OTHERS.keys() == set()
    assert OTHERS.keys() <= constants() and not OTHERS.keys() & listed
    fields = {field.name for field in dataclasses.fields(Limits)}
    assert fields - OF_LIMITS == {
        name.removeprefix("Limits:") for name in listed if name.startswith("Limits:")
    }


def test_a_limit_that_is_too_small_is_found():
    row = next(row for row in ROWS if row.constant == "Limits:pixels")
    too_small = replace(row, limit=1.99 * row.need[0])
    with pytest.raises(AssertionError, match="pixels of a frame: .* for 1080p_sr_distilled, limit"):
        test_a_limit_is_at_least_twice_the_largest_need(too_small)
