"""The plan that --print_config prints, and the tables of docs/cost.md and docs/few_steps.md."""

import re
from pathlib import Path

import pytest

import post_train
from hyvideo.files.text import lines_of
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.disk import disk_bytes
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.hours import (
    decode_seconds,
    forward_seconds,
    forwards_per_rollout,
    iteration_seconds,
    stage_seconds,
    whole_run,
)
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.plan import length_rows, plan_lines, steps_table
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.config import Config
from hyvideo.settings.run_inputs import RunInputs

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", "configs/hunyuanvideo15_480p_8gpu.yaml")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def print_config(capsys, monkeypatch):
    """Exit code and output of ``post_train.py --print_config`` with the given flags."""

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["post_train.py", *flags, "--print_config"])
        code = post_train.main()
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def planned(name="paper/table2_b_8gpu", world_size=8, hardware=None, **changes):
    config = load_config(f"configs/{name}.yaml", **changes)
    sizes = released_sizes("480p_t2v")
    return PlannedRun(config, world_size, sizes, hardware=hardware or Hardware())


def length_lines(run):
    return lines_of(length_rows(run))


def test_a_plan_says_what_runs_whether_it_fits_how_long_it_takes_and_what_is_missing(print_config):
    code, text = print_config(*CONFIG, "--gpu", "H100", "--world_size", "8")
    assert code == 0
    for words in (
        "8.33 B parameters",
        "248 TFLOP for 18,018 video tokens and 300 text tokens",
        "NPROC=8 bash run_post_train.sh --config configs/",
        "of 79.1 GiB",
        "pretrained_model_root",
    ):
        assert words in text
    assert "\nfits: " in text


def test_a_run_that_does_not_fit_gets_one_command_that_does(print_config):
    flags = ("--activation_checkpointing", "none", "--gpu_memory", "60", "--world_size", "8")
    _, text = print_config(*CONFIG, *flags)
    commands = [line for line in text.splitlines() if line.startswith("command ")]
    assert len(commands) == 1 and "--activation_checkpointing full" in commands[0]
    assert "\ntoo large: " in text and "; the command above fits" in text


def test_a_plan_of_wrong_settings_names_them_and_has_exit_code_2(print_config):
    code, text = print_config(*CONFIG, "--gpu", "H20")
    assert code == 2 and "gpu must be" in text


def test_a_missing_transformer_has_no_plan(tmp_path):
    config = planned(pretrained_model_root=str(tmp_path), transformer_version="mine").config
    assert plan_lines(RunInputs(config, 8), "auto") == []


def test_a_run_longer_than_a_week_warns_with_the_iterations_of_a_week():
    run = planned("hunyuanvideo15_480p_8gpu", valid_video_csv="", max_steps=10_000)
    (warning,) = [line for line in length_lines(run) if "WARNING" in line]
    in_a_week = int(warning.split("a week is ")[1].split()[0].replace(",", ""))
    assert whole_run(run.with_settings(max_steps=in_a_week)).seconds == pytest.approx(
        7 * 24 * 3600, rel=1e-3
    )
    shorter = run.with_settings(max_steps=int(0.999 * in_a_week))
    assert "WARNING" not in "".join(length_lines(shorter))


def test_a_validation_of_longer_videos_needs_more_memory_than_the_rollouts():
    full = {"activation_checkpointing": "full"}
    with_validation, without = (
        memory(planned(**full, **changes)) for changes in ({}, {"valid_video_csv": ""})
    )
    assert with_validation.total("validation") > without.total("decode")
    assert "validation" not in without.phases


# --- tables of the documentation ----------------------------------------------------------------


@pytest.fixture
def compare(check_generated):
    """A function that compares a table of a page with ``rows``; with --regenerate, it
    replaces the table, also by a longer or shorter one.
    """

    def compare(page, rows):
        path, new = ROOT / "docs" / page, table(rows).splitlines()
        lines, width = path.read_text().splitlines(), len(rows[0])
        starts = [
            number
            for number, line in enumerate(lines)
            if line.startswith(f"| {rows[0][0]} | {rows[0][1]} |")
            and len(line.split("|")) == width + 2
        ]
        assert len(starts) == 1, (
            f"{page} must have one table that begins with {rows[0][0]}, got {len(starts)}"
        )
        end = next(
            number for number in range(starts[0], len(lines)) if not lines[number].startswith("|")
        )
        lines[starts[0] : end] = new
        check_generated(path, "\n".join(lines) + "\n")

    return compare


def table(rows):
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def test_memory_tables_of_the_documentation_are_up_to_date(compare):
    config = load_config(ROOT / CONFIG[1])

    def peak(gpus, sp_size):
        run = PlannedRun(config.with_settings(sp_size=sp_size), gpus, released_sizes("480p_t2v"))
        return f"{memory(run).peak() / GIB:.1f}"

    compare(
        "cost.md",
        [(gpus, *(peak(gpus, sp_size) for sp_size in (1, 2, 4, 8))) for gpus in (8, 16, 64)],
    )


def test_the_plan_beside_the_stopwatch_of_visual_rl_is_up_to_date(compare):
    """The stages of visual-rl follow from its report (docs/cost.md): 44 minutes, and 134 for an
    earlier recipe.
    """
    config = load_config(ROOT / "configs/wan21_4gpu_hpsv3.yaml")
    sizes = released_sizes(config.model.transformer_version)
    planned = stage_seconds(PlannedRun(config, 4, sizes, hardware=hardware_of("L40S")))
    scoring = 24 * 8.4  # seconds of a video
    update = 96 * 60 / 10  # ten steps before, now one
    sampling = (1 - 0.27) * ((134 - 96) * 60 - scoring)
    whole = 44 * 60
    rows = (
        ("sampling and decoding", sampling, planned["rollout"] + planned["decode"]),
        ("scoring", scoring, planned["reward"]),
        ("update", update, planned["update"]),
        ("the rest", whole - sampling - scoring - update, planned["anchor"]),
        ("sum", whole, sum(planned.values())),
    )
    compare("cost.md", [(name, f"{theirs:,.0f}", f"{ours:,.0f}") for name, theirs, ours in rows])

    one = config.with_settings(lora_rank=0)
    run = PlannedRun(one, 1, sizes, hardware=hardware_of("RTX 5090"))
    video = 20 * 2 * forward_seconds(run) + decode_seconds(run)
    page = (ROOT / "docs/cost.md").read_text()
    assert f"The plan for the transformer and the VAE is {video:.1f} seconds." in page


HALF = "--sde_window fixed:0:10"
LORA = "--lora_rank 32 --enable_fsdp false"
RECIPES = (
    ("1 RTX 4090", "wan21_1gpu_nft", ""),
    ("1 RTX 4090", "wan21_1gpu_sage", ""),
    ("1 RTX 4090", "wan21_1gpu_guidance", ""),
    ("1 RTX 4090", "wan21_1gpu_draft", ""),
    ("1 RTX 4090", "wan21_1gpu_dpo", ""),
    ("1 RTX 4090", "wan21_1gpu_sft", ""),
    ("1 RTX 4090", "wan21_1gpu_student", ""),
    ("1 RTX 4090", "wan21_1gpu_4step", ""),
    ("1 RTX 4090", "wan22_1gpu_i2v_nft", ""),
    ("1 RTX 4090", "wan22_a14b_1gpu_24gb", ""),
    ("1 RTX 4090", "wan22_a14b_1gpu_sft", ""),
    ("1 L40S", "wan22_a14b_1gpu_48gb", ""),
    ("1 L40S", "wan22_a14b_1gpu_i2v", ""),
    ("1 RTX 4090", "wan21_i2v_14b_1gpu_24gb", ""),
    ("1 H100", "wan21_i2v_14b_1gpu_80gb", ""),
    ("1 H100", "wan21_1gpu_nft", ""),
    ("1 H100", "wan22_a14b_1gpu_80gb", ""),
    ("4 L40S", "wan21_4gpu_hpsv3", ""),
    ("8 H100", "wan21_8gpu_nft", ""),
    ("8 H100", "wan22_a14b_8gpu", ""),
    ("8 H100", "wan21_8gpu_guidance", ""),
    ("1 RTX 4090", "hunyuanvideo15_1gpu_24gb", ""),
    ("1 L40S", "hunyuanvideo15_1gpu", ""),
    ("1 A100", "hunyuanvideo15_1gpu", ""),
    ("1 H100", "hunyuanvideo15_1gpu", ""),
    ("1 H100", "hunyuanvideo15_1gpu_dpo", ""),
    ("1 H100", "hunyuanvideo15_1gpu_sft", ""),
    ("1 H100", "hunyuanvideo15_1gpu_4step", ""),
    ("8 A100", "hunyuanvideo15_480p_8gpu", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu", HALF),
    ("8 A100", "hunyuanvideo15_480p_8gpu_nft", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu_nft", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu_nft", LORA),
    ("8 H100", "hunyuanvideo15_480p_8gpu_guidance", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu_draft", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu_student", ""),
    ("8 H100", "hunyuanvideo15_480p_8gpu_4step", ""),
    ("64 H100", "hunyuanvideo15_480p_64gpu", ""),
    ("64 A100", "hunyuanvideo15_480p_64gpu", ""),
    ("8 A100", "paper/table2_b_8gpu", ""),
    ("8 H100", "paper/table2_b_8gpu", ""),
    ("64 H100", "paper/table2_b_64gpu", ""),
)
LABELS = {"": "", HALF: ", `fixed:0:10`", LORA: ", LoRA of rank 32"}


@pytest.mark.system
def test_the_table_of_costs_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(gpus, name, flags):
        number, gpu = gpus.split(maxsplit=1)
        config = parse(["--config", f"configs/{name}.yaml", *flags.split()]).config
        architecture = released_sizes(config.model.transformer_version)
        hardware = hardware_of(gpu)
        run = PlannedRun(config, int(number), architecture, hardware=hardware)
        length, needed = whole_run(run), memory(run).needed_gib
        assert needed <= hardware.gpu_memory - 1.0
        return (
            gpus,
            f"`{name}`{LABELS[flags]}",
            f"{length.iteration_seconds:,.0f}",
            run.plan.rollouts,
            length.iterations,
            f"{length.seconds / 3600:.1f}",
            f"{length.gpu_hours:,.0f}",
            f"{needed:.1f}",
            f"{sum(disk_bytes(run).values()) / GIB:.0f}",
        )

    rows = [row(*recipe) for recipe in RECIPES]
    names = {
        str(path.relative_to(ROOT / "configs").with_suffix(""))
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    planned = {
        name for name in names if name.startswith(("wan2", "hunyuanvideo15", "paper/table2_b"))
    }
    assert planned == {name for _, name, _ in RECIPES}
    compare("cost.md", rows)


PER_ROLLOUT = (
    ("H100", "paper/table2_b_8gpu"),
    ("H100", "hunyuanvideo15_480p_8gpu"),
    ("H100", "hunyuanvideo15_1gpu"),
    ("H100", "hunyuanvideo15_480p_8gpu_nft"),
    ("H100", "hunyuanvideo15_480p_8gpu_4step"),
    ("H100", "hunyuanvideo15_1gpu_4step"),
    ("RTX 4090", "wan21_1gpu_nft"),
    ("RTX 4090", "wan21_1gpu_4step"),
)


@pytest.mark.system
def test_the_table_of_rollouts_per_hour_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)
    rows = []
    hourly = {}
    for gpu, name in PER_ROLLOUT:
        config = parse(["--config", f"configs/{name}.yaml"]).config
        architecture = released_sizes(config.model.transformer_version)
        num_gpus = 8 if "_8gpu" in name else 1
        run = PlannedRun(config, num_gpus, architecture, hardware=hardware_of(gpu))
        seconds = whole_run(run).iteration_seconds * num_gpus
        hourly[name] = run.plan.rollouts / seconds * 3600
        forwards = forwards_per_rollout(run)
        rows.append((f"`{name}`", gpu, f"{forwards:.0f}", f"{hourly[name]:,.0f}"))
    few = hourly["hunyuanvideo15_480p_8gpu_4step"]
    assert few > 10 * hourly["paper/table2_b_8gpu"] and few > hourly["hunyuanvideo15_480p_8gpu_nft"]
    compare("few_steps.md", rows)


def predicted_hours(name, flags=(), world_size=8, gpu="H100"):
    """Return the hours of a run as on a page."""
    config = parse(["--config", f"configs/{name}.yaml", *flags]).config
    architecture = released_sizes(config.model.transformer_version)
    run = PlannedRun(config, world_size, architecture, hardware=hardware_of(gpu))
    return f"{whole_run(run).seconds / 3600:.1f}"


def test_the_hours_in_the_readme_are_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    row = r"^\| (?:(\d+) x )?([^|]+), \d+ GB \|[^|]*\| \[?`(\w+)`[^|]*\| ([\d.]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == text.count(" GB | ") >= 8
    for count, gpu, name, hours in rows:
        assert hours == predicted_hours(name, world_size=int(count or 1), gpu=gpu), (name, gpu)


@pytest.mark.system
def test_the_table_of_video_sizes_on_the_page_on_wan_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(name, frames, height, width):
        batched = "true" if height == 240 else "false"  # a larger video fills the GPU
        size = {"sample_n_frames": frames, "height": height, "width": width}
        config = load_config(f"configs/{name}.yaml", **size, batched_forward=batched)
        architecture = released_sizes(config.model.transformer_version)
        cells = []
        for gpu in ("RTX 4090", "H100"):
            run = PlannedRun(config, 1, architecture, hardware=hardware_of(gpu))
            length = whole_run(run)
            cells.append(f"{length.iteration_seconds:.0f} s, {length.seconds / 3600:.1f} h")
            needed = memory(run).needed_gib
        return f"`{name}`", f"{frames} frames of {height} x {width}", *cells, f"{needed:.1f} GiB"

    sizes = [(33, 240, 416), (49, 480, 832), (81, 480, 832)]
    rows = [
        row(name, *size) for name in ("wan21_1gpu_nft", "wan21_1gpu_guidance") for size in sizes
    ]
    largest = (65, 240, 416)  # on an RTX 4090, with reward gradients
    compare(
        "train_wan.md",
        [*rows, row("wan21_1gpu_draft", *sizes[0]), row("wan21_1gpu_draft", *largest)],
    )


def test_the_memory_of_versions_on_the_page_on_wan_is_up_to_date(monkeypatch, check_generated):
    monkeypatch.chdir(ROOT)
    path = ROOT / "docs" / "train_wan.md"
    text = path.read_text()
    rows = re.findall(
        r"^\| (.*) \| `(--transformer_version [^`]*)` \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 3
    for version, flags, gib in rows:
        config = parse(["--config", "configs/wan21_1gpu_nft.yaml", *flags.split()]).config
        architecture = released_sizes(config.model.transformer_version)
        run = PlannedRun(config, 8 if "eight GPUs" in version else 1, architecture)
        needed = f"{memory(run).needed_gib:.1f}"
        text = text.replace(f"`{flags}` | {gib} |", f"`{flags}` | {needed} |")
    check_generated(path, text)


def test_the_table_of_networks_is_up_to_date(compare):
    def row(gpus, replicas, batched):
        changes = {"dp_replicate": replicas, "batched_forward": batched}
        sizes = released_sizes("480p_t2v")
        times = []
        for network in (50.0, 3.0):
            config = load_config(ROOT / CONFIG[1], **changes)
            run = PlannedRun(config, gpus, sizes, hardware=Hardware(network=network))
            times.append(f"{iteration_seconds(run):.0f}")
        return gpus, replicas, "batched" if batched == "true" else "separate", *times

    cells = [(8, 1), (16, 1), (16, 2), (64, 1), (64, 8)]
    rows = [row(*cell, "false") for cell in cells] + [row(64, 1, "true")]
    compare("cost.md", rows)


def test_the_table_of_steps_has_the_noise_and_weights_of_the_window():
    sampling = Config().with_settings(grpo_sampling_steps=4, shift=3.0, eta=0.7).sampling
    made = sampling.schedule()
    _, *lines = (line.split() for line in steps_table(sampling, "fixed:1:2"))
    in_window = made.with_noise_only_at([1, 2])
    assert [float(line[2]) for line in lines] == pytest.approx(
        [step.std for step in in_window.transitions], abs=1e-4
    )
    assert [float(line[3]) for line in lines] == pytest.approx(
        in_window.equalizer_weights.tolist(), rel=1e-3
    )
