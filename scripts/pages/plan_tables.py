"""Tables of pages with predicted hours, memory and disk, from the planner."""

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from hyvideo.files.files import ROOT
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.disk import disk_bytes
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.hours import (
    decode_seconds,
    forward_seconds,
    stage_seconds,
    whole_run,
)
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import parse
from scripts.pages.markdown import markdown_table


@dataclass(frozen=True)
class Recipe:
    """A config on a number of GPUs of one kind, perhaps with more flags."""

    gpus: str  # "1 RTX 4090"
    config: str
    flags: str = ""
    label: str = ""  # of the flags

    @property
    def num_gpus(self) -> int:
        return int(self.gpus.split(maxsplit=1)[0])

    @property
    def hardware(self) -> Hardware:
        return hardware_of(self.gpus.split(maxsplit=1)[1])


HALF = ("--sde_window fixed:0:10", ", `fixed:0:10`")
LORA = ("--lora_rank 32 --enable_fsdp false", ", LoRA of rank 32")
RECIPES = (
    Recipe("1 RTX 4090", "wan21_1gpu_nft"),
    Recipe("1 RTX 4090", "wan21_1gpu_sage"),
    Recipe("1 RTX 4090", "wan21_1gpu_guidance"),
    Recipe("1 RTX 4090", "wan21_1gpu_draft"),
    Recipe("1 RTX 4090", "wan21_1gpu_dpo"),
    Recipe("1 RTX 4090", "wan21_1gpu_sft"),
    Recipe("1 RTX 4090", "wan21_1gpu_student"),
    Recipe("1 RTX 4090", "wan21_1gpu_4step"),
    Recipe("1 RTX 4090", "wan22_1gpu_i2v_nft"),
    Recipe("1 RTX 4090", "wan22_a14b_1gpu_24gb"),
    Recipe("1 RTX 4090", "wan22_a14b_1gpu_sft"),
    Recipe("1 RTX 4090", "wan21_i2v_14b_1gpu_24gb"),
    Recipe("1 RTX 4090", "hunyuanvideo15_1gpu_24gb"),
    Recipe("1 L40S", "wan22_a14b_1gpu_48gb"),
    Recipe("1 L40S", "wan22_a14b_1gpu_i2v"),
    Recipe("1 L40S", "hunyuanvideo15_1gpu"),
    Recipe("4 L40S", "wan21_4gpu_hpsv3"),
    Recipe("1 H100", "wan21_1gpu_nft"),
    Recipe("1 H100", "wan22_a14b_1gpu_80gb"),
    Recipe("1 H100", "wan21_i2v_14b_1gpu_80gb"),
    Recipe("1 H100", "hunyuanvideo15_1gpu"),
    Recipe("1 H100", "hunyuanvideo15_1gpu_dpo"),
    Recipe("1 H100", "hunyuanvideo15_1gpu_sft"),
    Recipe("1 H100", "hunyuanvideo15_1gpu_4step"),
    Recipe("8 H100", "wan21_8gpu_nft"),
    Recipe("8 H100", "wan21_8gpu_guidance"),
    Recipe("8 H100", "wan22_a14b_8gpu"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu", *HALF),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_nft"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_nft", *LORA),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_guidance"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_draft"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_student"),
    Recipe("8 H100", "hunyuanvideo15_480p_8gpu_4step"),
    Recipe("8 H100", "paper/table2_b_8gpu"),
    Recipe("8 A100", "hunyuanvideo15_480p_8gpu_nft"),
    Recipe("64 H100", "hunyuanvideo15_480p_64gpu"),
    Recipe("64 H100", "paper/table2_b_64gpu"),
)
# What a row of the README says beside its hours: GPU, its memory in GB, model, what it learns from.
README_ROWS = (
    (Recipe("1 RTX 4090", "wan21_1gpu_nft"), 24, "**Wan2.1 1.3B: start here**", "a reward"),
    (Recipe("1 RTX 4090", "wan21_1gpu_sage"), 24, "Wan2.1 1.3B", "a reward, SAGE-GRPO"),
    (Recipe("1 RTX 4090", "wan21_1gpu_dpo"), 24, "Wan2.1 1.3B", "your ratings"),
    (Recipe("1 RTX 4090", "wan22_1gpu_i2v_nft"), 24, "Wan2.2 5B, from an image", "a reward"),
    (Recipe("1 RTX 4090", "wan22_a14b_1gpu_24gb"), 24, "Wan2.2 A14B, 4 steps", "a reward"),
    (Recipe("1 RTX 4090", "wan21_i2v_14b_1gpu_24gb"), 24, "Wan2.1 14B, from an image", "a reward"),
    (Recipe("1 RTX 4090", "hunyuanvideo15_1gpu_24gb"), 24, "HunyuanVideo-1.5", "a reward"),
    (Recipe("1 L40S", "hunyuanvideo15_1gpu"), 48, "HunyuanVideo-1.5", "a reward"),
    (Recipe("4 L40S", "wan21_4gpu_hpsv3"), 48, "Wan2.1 1.3B", "HPSv3"),
    (Recipe("1 H100", "hunyuanvideo15_1gpu"), 80, "HunyuanVideo-1.5", "a reward"),
    (Recipe("8 H100", "wan21_8gpu_nft"), 80, "Wan2.1 1.3B", "a reward"),
    (Recipe("8 H100", "wan22_a14b_8gpu"), 80, "Wan2.2 A14B, all weights", "a reward"),
    (
        Recipe("8 H100", "hunyuanvideo15_480p_8gpu"),
        80,
        "HunyuanVideo-1.5, all weights",
        "a reward, SAGE-GRPO",
    ),
    (
        Recipe("8 H100", "hunyuanvideo15_480p_8gpu_nft"),
        80,
        "HunyuanVideo-1.5, all weights",
        "a reward",
    ),
)
WAN_VERSIONS = {  # label: (GPUs, flags)
    "Wan2.1 14B, LoRA, one GPU of 48 GB": ("1 L40S", "--transformer_version wan2.1_t2v_14b"),
    "Wan2.1 14B, all weights, eight GPUs of 80 GB": (
        "8 H100",
        "--transformer_version wan2.1_t2v_14b --lora_rank 0 --learning_rate 1e-5 --enable_fsdp true",
    ),
    "Wan2.2 5B, LoRA, one GPU of 24 GB": (
        "1 RTX 4090",
        "--transformer_version wan2.2_ti2v_5b --height 256 --width 448",
    ),
}


def planned(recipe: Recipe, *flags: str) -> PlannedRun:
    """Return the plan of a recipe."""
    words = ["--config", str(ROOT / f"configs/{recipe.config}.yaml"), *recipe.flags.split(), *flags]
    config = parse(words).config
    sizes = released_sizes(config.model.transformer_version)
    return PlannedRun(config, recipe.num_gpus, sizes, hardware=recipe.hardware)


def hours(run: PlannedRun) -> str:
    return f"{whole_run(run).seconds / 3600:.1f}"


def video_size(run: PlannedRun) -> str:
    """Return frames, height and width of the videos that are trained on."""
    data = run.config.data
    return f"{data.sample_n_frames} x {data.height} x {data.width}"


def costs() -> str:
    """Return video size, hours, memory and disk of each recipe, in a table for each kind and number
    of GPUs.
    """
    heads = ["config", "video", "s per iteration", "rollouts", "iterations", "hours", "GiB per GPU"]
    tables = []
    for gpus, recipes in groupby(RECIPES, key=attrgetter("gpus")):
        rows = []
        for recipe in recipes:
            run = planned(recipe)
            length = whole_run(run)
            rows.append(
                [
                    f"`{recipe.config}`{recipe.label}",
                    video_size(run),
                    f"{length.iteration_seconds:,.0f}",
                    str(run.plan.rollouts),
                    str(length.iterations),
                    hours(run),
                    f"{memory(run).needed_gib:.1f}",
                    f"{sum(disk_bytes(run).values()) / GIB:.0f}",
                ]
            )
        table = markdown_table([*heads, "disk, GiB"], rows)
        tables.append(f"**{gpus}**\n\n{table.strip()}")
    return "\n\n".join(tables)


def readme_rows() -> str:
    """Return what can be trained on which GPU, and how long it takes: a table for each GPU."""
    heads = ["GPUs", "model", "learns from", "hours (predicted)", "video", "config"]
    tables = []
    for gpu, rows in groupby(README_ROWS, key=_gpu_and_memory):
        lines = []
        for recipe, _, model, source in rows:
            run = planned(recipe)
            cells = [str(recipe.num_gpus), model, source, hours(run), video_size(run)]
            lines.append([*cells, f"`{recipe.config}`"])
        tables.append(f"**{gpu}**\n\n{markdown_table(heads, lines).strip()}")
    return "\n\n".join(tables)


def _gpu_and_memory(row: tuple[Recipe, int, str, str]) -> str:
    """Return the GPU of a row of the README and its memory: "L40S, 48 GB"."""
    recipe, gigabytes, *_ = row
    return f"{recipe.gpus.split(maxsplit=1)[1]}, {gigabytes} GB"


def beside_a_stopwatch() -> str:
    """Return the seconds of a public run and of diffusers beside the plan.

    Measured by visual-rl (docs/results.md, "A public run at full size"): 44 minutes for an
    iteration of 24 videos on each GPU, 8.4 s to score one of them. An earlier recipe took 134
    minutes, of which 96 were backward passes of ten steps instead of one, without the compilation
    that shortens sampling by 27 %. A video of diffusers: 73.0 s on an RTX 5090.
    """
    whole, scoring, update = 44 * 60, 24 * 8.4, 96 * 60 / 10
    sampling = (1 - 0.27) * ((134 - 96) * 60 - scoring)
    plan = stage_seconds(planned(Recipe("4 L40S", "wan21_4gpu_hpsv3")))
    video = planned(Recipe("1 RTX 5090", "wan21_4gpu_hpsv3", "--lora_rank 0"))
    video_seconds = 20 * 2 * forward_seconds(video) + decode_seconds(video)
    rows = (
        ("4 L40S", "sampling and decoding", sampling, plan["rollout"] + plan["decode"]),
        ("4 L40S", "scoring by HPSv3", scoring, plan["reward"]),
        ("4 L40S", "update", update, plan["update"]),
        ("4 L40S", "the rest", whole - sampling - scoring - update, plan["anchor"]),
        ("4 L40S", "an iteration", whole, sum(plan.values())),
        ("1 RTX 5090", "a video of 20 steps by diffusers", 73.0, video_seconds),
    )
    cells = [[gpus, what, f"{theirs:,.0f}", f"{ours:,.0f}"] for gpus, what, theirs, ours in rows]
    return markdown_table(["GPUs", "seconds of", "visual-rl", "plan"], cells)


def wan_sizes() -> str:
    """Return time and memory of the recipes of Wan2.1 1.3B on one GPU, by the size of the videos."""
    small, middle, large = (33, 240, 416), (49, 480, 832), (81, 480, 832)
    sizes = {
        "wan21_1gpu_nft": (small, middle, large),
        "wan21_1gpu_draft": (small, (65, 240, 416)),  # the largest on an RTX 4090
    }
    rows = []
    for name, size in ((each, size) for each in sizes for size in sizes[each]):
        frames, height, width = size
        batched = "true" if height == 240 else "false"  # a larger video fills the GPU
        flags = ["--sample_n_frames", str(frames), "--height", str(height), "--width", str(width)]
        flags += ["--batched_forward", batched]
        runs = [planned(Recipe(gpu, name), *flags) for gpu in ("1 RTX 4090", "1 H100")]
        times = [f"{whole_run(run).iteration_seconds:.0f} s, {hours(run)} h" for run in runs]
        needed = f"{memory(runs[0]).needed_gib:.1f} GiB"
        rows.append([f"`{name}`", f"{frames} frames of {height} x {width}", *times, needed])
    heads = ["config", "video size", "RTX 4090: iteration, run", "H100: iteration, run"]
    heads.append("memory on the RTX 4090")
    return markdown_table(heads, rows)


def wan_versions() -> str:
    """Return the memory of other versions of Wan with the recipe of DiffusionNFT."""
    rows = []
    for label, (gpus, flags) in WAN_VERSIONS.items():
        run = planned(Recipe(gpus, "wan21_1gpu_nft", flags))
        rows.append([label, f"`{flags}`", f"{memory(run).needed_gib:.1f}"])
    return markdown_table(["version", "flags", "GiB"], rows)
