"""The program scripts.plan, and the tables of docs/memory.md and docs/performance.md."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hyvideo.config.command_line import load_config, parse
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.models.sizes import read_architecture
from hyvideo.planning.cost import duration
from hyvideo.planning.disk import disk_bytes
from hyvideo.planning.hardware import SLOWER, Hardware, hardware_of
from hyvideo.planning.network import traffic
from hyvideo.planning.phases import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.whole_run import whole_run
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
    parts = ("8.327 B parameters", "8 = 4 replicas x sp_size 2", "optimizer state", "peak ", "forward pass  ")
    for words in (*parts, "communication ", "fastest "):
        assert words in done.stdout
    assert done.stdout.splitlines()[-1].startswith("fits: ")
    assert done.stdout == plan(*CONFIG, "--sp_size", "2")


def test_a_flag_of_the_run_changes_the_plan_and_the_verdict_is_the_last_line(plan):
    last = plan(*CONFIG, "--enable_gradient_checkpointing", "false", "--gpu_memory", "60").splitlines()[-1]
    assert "makes it fit: --enable_gradient_checkpointing true" in last


def test_an_illegal_size_prints_the_rule_and_possible_values(plan):
    last = plan(*CONFIG, "--world_size", "7", "--sp_size", "2").splitlines()[-1]
    assert last.startswith("illegal: ") and last.endswith("got sp_size 2 and WORLD_SIZE 7; possible values: 1, 7")


def test_a_gpu_is_planned_by_its_name_and_single_flags_change_it(plan):
    wan = ("--config", "configs/wan21_1gpu_nft.yaml", "--world_size", "1")
    by_name = plan(*wan, "--gpu", "rtx 4090")
    assert "125 TFLOP/s per GPU in matrix products (RTX 4090), 0.9 TB/s of its memory, 10 GB/s" in by_name
    assert "of 23.6 GiB" in by_name.splitlines()[-1]
    assert "including              optimizer 0.0" in by_name and "on-policy check" in by_name
    assert "of 20 GiB" in plan(*wan, "--gpu", "rtx 4090", "--gpu_memory", "20").splitlines()[-1]
    slow = plan(*wan, "--rate", "125")
    assert "in matrix products, 0.56 TB/s of its memory, 300 GB/s" in slow


def test_the_miniature_is_planned_from_its_config_json(plan):
    assert "4 blocks of width 96" in plan("--config", "configs/miniature.yaml", "--world_size", "1")


@pytest.fixture
def compare(check_generated):
    """A function that compares a table of a page with ``rows``; with --regenerate, it writes them."""

    def compare(page, rows):
        path, new = ROOT / "docs" / page, table(rows).splitlines()
        lines, width = path.read_text().splitlines(), len(rows[0])
        starts = [
            number
            for number, line in enumerate(lines)
            if line.startswith(f"| {rows[0][0]} | {rows[0][1]} |") and len(line.split("|")) == width + 2
        ]
        assert len(starts) == 1, f"{page} must have one table that begins with {rows[0][0]}, got {len(starts)}"
        lines[starts[0] : starts[0] + len(new)] = new
        check_generated(path, "\n".join(lines) + "\n")

    return compare


def table(rows):
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def test_memory_tables_of_the_documentation_are_up_to_date(compare):
    config = load_config(ROOT / CONFIG[1])

    def peak(gpus, sp_size):
        run = PlannedRun(config.with_settings(sp_size=sp_size), gpus, Architecture())
        return f"{memory(run).peak() / GIB:.1f}"

    compare("memory.md", [(gpus, *(peak(gpus, sp_size) for sp_size in (1, 2, 4, 8))) for gpus in (8, 16, 64)])


def test_times_in_the_documentation_are_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(name, gpus):
        run = PlannedRun(load_config(f"configs/{name}.yaml"), gpus, Architecture())
        length, slower = whole_run(run), whole_run(replace(run, hardware=SLOWER))
        times = (length.iteration_seconds, length.validation_seconds, length.seconds / 3600, length.gpu_hours)
        return (
            f"`{name}`",
            gpus,
            length.iterations,
            *(f"{time:,.0f}" for time in (*times, slower.seconds / 3600)),
            f"{memory(run).peak() / GIB:.1f}",
        )

    paper = [(f"paper/table2_{setting}_{gpus}gpu", gpus) for setting in "ab" for gpus in (8, 64)]
    names = {"8gpu": 8, "8gpu_nft": 8, "8gpu_guidance": 8, "64gpu": 64}
    general = [(f"hunyuanvideo15_480p_{name}", gpus) for name, gpus in names.items()]
    compare("performance.md", [row(name, gpus) for name, gpus in paper + general])


GPUS = (
    ("RTX 4090, 24 GB", 1, "1gpu_24gb"),
    ("L40S, 48 GB", 1, "1gpu"),
    ("A100, 80 GB", 1, "1gpu"),
    ("H100, 80 GB", 1, "1gpu"),
    ("8 A100, 80 GB", 8, "480p_8gpu"),
    ("8 H100, 80 GB", 8, "480p_8gpu"),
    ("8 H100, 80 GB", 8, "480p_8gpu_nft"),
    ("8 H100, 80 GB", 8, "480p_8gpu_guidance"),
)


def test_the_table_of_gpus_in_the_documentation_is_up_to_date(monkeypatch, compare):
    monkeypatch.chdir(ROOT)

    def row(gpu, world_size, name):
        config = load_config(f"configs/hunyuanvideo15_{name}.yaml")
        hardware = hardware_of(gpu.removeprefix("8 ").partition(",")[0])
        run = PlannedRun(config, world_size, Architecture(), hardware=hardware)
        length, needed = whole_run(run), memory(run).needed_gib
        assert needed <= hardware.gpu_memory - 1.0
        return (
            gpu,
            f"{hardware.rate:g}",
            f"`hunyuanvideo15_{name}`",
            f"{length.iteration_seconds:,.0f}",
            length.iterations,
            f"{length.seconds / 3600:.1f}",
            f"{needed:.1f}",
            f"{sum(disk_bytes(run).values()) / GIB:.0f}",
        )

    compare("train_hunyuanvideo.md", [row(*gpu) for gpu in GPUS])


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
    assert len(rows) == 3
    assert rows == {name: predicted_hours(name) for name in rows}
    assert f"in {rows['hunyuanvideo15_480p_8gpu']} hours on H100 (predicted)" in text
    wan = predicted_hours("wan21_1gpu_nft", world_size=1, gpu="RTX 4090")
    assert f"{wan} hours on an RTX 4090 (predicted)" in text


def test_the_hours_of_other_runs_on_the_page_on_hunyuan_video_are_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "train_hunyuanvideo.md").read_text())
    sage, nft, sage_64 = (f"hunyuanvideo15_480p_{kind}" for kind in ("8gpu", "8gpu_nft", "64gpu"))
    half = predicted_hours(sage, ["--sde_window", "fixed:0:10"])
    assert f"{half} h instead of {predicted_hours(sage)} h on 8 H100" in text
    lora, slow_lora = (predicted_hours(nft, LORA_FLAGS, gpu=gpu) for gpu in ("H100", "A100"))
    assert f"{lora} h on 8 H100 and {slow_lora} h on 8 A100" in text
    many = ["--dp_replicate", "8"]
    nodes, slow_nodes = (predicted_hours(nft, many, 64, gpu) for gpu in ("H100", "A100"))
    assert f"{nodes} h, or 97 s and {slow_nodes} h on A100" in text
    nodes, slow_nodes = (predicted_hours(sage_64, [], 64, gpu) for gpu in ("H100", "A100"))
    assert f"takes {nodes} h (A100: {slow_nodes} h)" in text


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
    compare("train_wan.md", [row(name, *size) for name in ("wan21_1gpu_nft", "wan21_1gpu_guidance") for size in sizes])


LORA_FLAGS = "--lora_rank 32 --lora_alpha 64 --enable_fsdp false".split()
RUNS = {
    "SAGE-GRPO, noise on 10 steps": ("hunyuanvideo15_480p_8gpu", ["--sde_window", "fixed:0:10"]),
    "SAGE-GRPO": ("hunyuanvideo15_480p_8gpu", []),
    "DiffusionNFT": ("hunyuanvideo15_480p_8gpu_nft", []),
    "LoRA, DiffusionNFT": ("hunyuanvideo15_480p_8gpu_nft", LORA_FLAGS),
    "Guidance distillation": ("hunyuanvideo15_480p_8gpu_guidance", []),
    "SAGE-GRPO as in Table 2 (B)": ("paper/table2_b_8gpu", []),
}


@pytest.mark.parametrize("name", RUNS)
def test_hours_of_the_recipes_in_the_documentation_are_up_to_date(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    path, flags = RUNS[name]
    run = PlannedRun(parse(["--config", f"configs/{path}.yaml", *flags]).config, 8, Architecture())
    fast, slow = whole_run(run), whole_run(replace(run, hardware=SLOWER))
    [row] = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    _, seconds, rollouts, hours, gpu_hours, on_a100 = row.split(" | ")
    assert (seconds, gpu_hours) == (f"{fast.iteration_seconds:.0f}", f"{fast.gpu_hours:.0f}")
    assert int(rollouts) == run.plan.rollouts
    for text, length in ((hours, fast), (on_a100, slow)):
        assert float(text.split()[0]) == pytest.approx(length.seconds / 3600, rel=0.02, abs=0.05)


def test_traffic_in_the_documentation_is_up_to_date(compare):
    def row(gpus, replicas, batched):
        changes = {"dp_replicate": replicas, "batched_forward": batched}
        fast = PlannedRun(load_config(ROOT / CONFIG[1], **changes), gpus, Architecture())
        slow = replace(fast, hardware=Hardware(network=3.0))
        sent, times = traffic(fast), [duration(run) for run in (fast, slow)]
        calls = "batched" if batched == "true" else "separate"
        spent = (value for time in times for value in (f"{time.network:.0f}", f"{time.total:.0f}"))
        return gpus, replicas, calls, f"{sent.received / 1e12:.1f}", f"{sent.from_other_nodes / 1e12:.2f}", *spent

    cells = [(8, 1), (16, 1), (16, 2), (64, 1), (64, 8)]
    rows = [row(*cell, "false") for cell in cells] + [row(64, 1, "true")]
    compare("performance.md", rows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((*CONFIG, "--wold_size", "8"), "unknown flag --wold_size"),
        ((*CONFIG, "--world_size", "0"), "--world_size must be a positive number, got 0"),
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
        (("--config", "nowhere.yaml"), "must be a readable YAML file"),
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
