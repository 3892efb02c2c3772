"""The program scripts.plan, and the tables of docs/cost.md and docs/few_steps.md."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.cost import duration, forwards_per_rollout
from hyvideo.planning.disk import disk_bytes
from hyvideo.planning.hardware import Hardware, hardware_of
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.network import traffic
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.whole_run import whole_run
from hyvideo.settings.command_line import load_config, parse
from scripts.plan import main

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", "configs/hunyuanvideo15_480p_8gpu.yaml")

HD = {"height": 720, "width": 1280}


@pytest.fixture
def plan(capsys, monkeypatch):
    """Output of the program, run in this process."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        main(list(arguments))
        printed = capsys.readouterr()
        assert not printed.err
        return printed.out

    return run


def test_a_plan_has_memory_cost_and_a_verdict(plan):
    command = [sys.executable, "-m", "scripts.plan", *CONFIG, "--gpu", "H100", "--sp_size", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    parts = (
        "8.327 B parameters",
        "8 = 4 replicas x sp_size 2",
        "optimizer state",
        "peak ",
        "forward pass  ",
    )
    for words in (*parts, "communication ", "command "):
        assert words in done.stdout
    assert done.stdout.splitlines()[-1].startswith("fits: ")
    assert done.stdout == plan(*CONFIG, "--sp_size", "2")


def test_a_flag_of_the_run_changes_the_plan_and_the_verdict_is_the_last_line(plan):
    flags = ("--enable_gradient_checkpointing", "false", "--gpu_memory", "60")
    lines = plan(*CONFIG, *flags).splitlines()
    assert lines[-1].startswith("too large")
    commands = [line for line in lines if line.startswith("command ")]
    assert len(commands) == 1 and "run_post_train.sh" in commands[0]


def test_an_illegal_size_prints_the_rule_and_possible_values(plan):
    last = plan(*CONFIG, "--world_size", "7", "--sp_size", "2").splitlines()[-1]
    assert last.startswith("illegal: sp_size ") and last.endswith("possible values: 1, 7")


def test_a_gpu_is_planned_by_its_name_and_single_flags_change_it(plan):
    wan = ("--config", "configs/wan21_1gpu_nft.yaml", "--world_size", "1")
    by_name = plan(*wan, "--gpu", "rtx 4090")
    assert (
        "125 TFLOP/s per GPU in matrix products (RTX 4090), 0.9 TB/s of its memory, 10 GB/s"
        in by_name
    )
    assert "of 23.6 GiB" in by_name.splitlines()[-1]
    assert "including              optimizer 0.0" in by_name and "on-policy check" in by_name
    assert "of 20 GiB" in plan(*wan, "--gpu", "rtx 4090", "--gpu_memory", "20").splitlines()[-1]
    slow = plan(*wan, "--rate", "125")
    assert "in matrix products, 0.56 TB/s of its memory, 300 GB/s" in slow


def test_the_miniature_is_planned_from_its_config_json(plan):
    assert "4 blocks of width 96" in plan("--config", "configs/miniature.yaml", "--world_size", "1")


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
        run = PlannedRun(config.with_settings(sp_size=sp_size), gpus, Architecture())
        return f"{memory(run).peak() / GIB:.1f}"

    compare(
        "cost.md",
        [(gpus, *(peak(gpus, sp_size) for sp_size in (1, 2, 4, 8))) for gpus in (8, 16, 64)],
    )


HALF = "--sde_window fixed:0:10"
LORA = "--lora_rank 32 --lora_alpha 64 --enable_fsdp false"
RECIPES = (
    ("1 RTX 4090", "wan21_1gpu_nft", ""),
    ("1 RTX 4090", "wan21_1gpu_guidance", ""),
    ("1 RTX 4090", "wan21_1gpu_draft", ""),
    ("1 RTX 4090", "wan21_1gpu_dpo", ""),
    ("1 RTX 4090", "wan21_1gpu_student", ""),
    ("1 RTX 4090", "wan21_1gpu_4step", ""),
    ("1 RTX 4090", "wan22_1gpu_i2v_nft", ""),
    ("1 H100", "wan21_1gpu_nft", ""),
    ("8 H100", "wan21_8gpu_nft", ""),
    ("8 H100", "wan21_8gpu_guidance", ""),
    ("1 RTX 4090", "hunyuanvideo15_1gpu_24gb", ""),
    ("1 L40S", "hunyuanvideo15_1gpu", ""),
    ("1 A100", "hunyuanvideo15_1gpu", ""),
    ("1 H100", "hunyuanvideo15_1gpu", ""),
    ("1 H100", "hunyuanvideo15_1gpu_dpo", ""),
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


def test_the_table_of_costs_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(gpus, name, flags):
        number, gpu = gpus.split(maxsplit=1)
        config = parse(["--config", f"configs/{name}.yaml", *flags.split()]).config
        architecture = read_architecture("nowhere", config.model.transformer_version)
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


def test_the_table_of_rollouts_per_hour_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)
    rows = []
    hourly = {}
    for gpu, name in PER_ROLLOUT:
        config = parse(["--config", f"configs/{name}.yaml"]).config
        architecture = read_architecture("nowhere", config.model.transformer_version)
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
    architecture = read_architecture("nowhere", config.model.transformer_version)
    run = PlannedRun(config, world_size, architecture, hardware=hardware_of(gpu))
    return f"{whole_run(run).seconds / 3600:.1f}"


def test_the_hours_in_the_readme_are_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    rows = dict(re.findall(r"\| `(hunyuanvideo15_480p_8gpu\w*)\.yaml` \|[^|]*\| ([\d.]+) \|", text))
    assert len(rows) == 4
    assert rows == {name: predicted_hours(name) for name in rows}
    wan = predicted_hours("wan21_1gpu_nft", world_size=1, gpu="RTX 4090")
    assert f"{wan} hours on an RTX 4090 (predicted)" in text


def test_the_table_of_video_sizes_on_the_page_on_wan_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(name, frames, height, width):
        batched = "true" if height == 240 else "false"  # a larger video fills the GPU
        size = {"sample_n_frames": frames, "height": height, "width": width}
        config = load_config(f"configs/{name}.yaml", **size, batched_forward=batched)
        architecture = read_architecture("nowhere", config.model.transformer_version)
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


def test_traffic_in_the_documentation_is_up_to_date(compare):
    def row(gpus, replicas, batched):
        changes = {"dp_replicate": replicas, "batched_forward": batched}
        fast = PlannedRun(load_config(ROOT / CONFIG[1], **changes), gpus, Architecture())
        slow = replace(fast, hardware=Hardware(network=3.0))
        sent, times = traffic(fast), [duration(run) for run in (fast, slow)]
        calls = "batched" if batched == "true" else "separate"
        spent = (value for time in times for value in (f"{time.network:.0f}", f"{time.total:.0f}"))
        return (
            gpus,
            replicas,
            calls,
            f"{sent.received / 1e12:.1f}",
            f"{sent.from_other_nodes / 1e12:.2f}",
            *spent,
        )

    cells = [(8, 1), (16, 1), (16, 2), (64, 1), (64, 8)]
    rows = [row(*cell, "false") for cell in cells] + [row(64, 1, "true")]
    compare("cost.md", rows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((*CONFIG, "--wold_size", "8"), "unknown flag --wold_size"),
        ((*CONFIG, "--world_size", "0"), "--world_size must be a positive number, got 0"),
        (
            (*CONFIG, "--world_size", "1" + "0" * 400),
            "--world_size must be at most 100,000, got 1000",
        ),
        ((*CONFIG, "--network", "inf"), "--network must be at most 100,000, got inf"),
        ((*CONFIG, "--gpu", "H20"), "gpu must be one of H100, H200, "),
        ((*CONFIG, "--network", "0"), "--network must be a positive number, got 0"),
        ((*CONFIG, "--rate", "nan"), "--rate must be a positive number, got nan"),
        ((*CONFIG, "--gpu_memory", "much"), "invalid float value: 'much'"),
        ((*CONFIG, "--batch_size", "0"), "batch_size must be at least 1, got 0"),
        ((*CONFIG, "--height", "350"), "height must be a multiple of 16, got 350"),
        (
            (*CONFIG, "--validation_height", "490", "--validation_width", "864"),
            "height must be a multiple of 16, got 490",
        ),
        ((*CONFIG, "--transformer_version", "beauty"), "transformer_version must be one of"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_invalid_input_exits_with_code_2_and_one_message(arguments, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["plan.py"])
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    messages = [line for line in printed.err.splitlines() if line.startswith("plan.py: ")]
    assert len(messages) == 1 and words in messages[0]
    assert len(printed.err.splitlines()) <= 4
