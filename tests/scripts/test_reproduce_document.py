"""docs/reproduce.md: its commands run as printed, and its hours are those of the plan."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.hours import whole_run
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(
    r"^(?:python|torchrun --nproc_per_node=8) -m ((?:scripts|examples)\.\w+) ([^#\n]*--[^#\n]*)",
    TEXT.replace("\\\n", " "),
    re.MULTILINE,
)
NO_KL = ["--kl_strategy", "none", "--kl_weight", "0"]
# By program: flags that end it right after parsing, the exit code, and a part of the output.
ENDS = {
    "scripts.reproduce_table2": (["--dry_run"], 0, "to run: "),
    "scripts.reproduce_figures": (["--dry_run"], 0, "to run: "),
    "scripts.compare_policies": (["--num_prompts", "0"], 2, "--num_prompts must be at least 1"),
    "examples.gradient_norms": (["--batch_size", "0"], 2, "batch_size must be"),
    "examples.sampler_figures": (["--gradients", "missing.json"], 2, "missing.json"),
}


def lines_of_the_pages():
    """Return the commands of scripts.reproduce_* in code blocks of the README and docs/, with
    continuation lines.
    """
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    found = re.findall(r"^python -m (scripts\.reproduce_\w+) ([^#\n]*)", text, re.MULTILINE)
    return sorted({(module, " ".join(flags.split())) for module, flags in found})


@pytest.mark.slow
@pytest.mark.parametrize("module, flags", lines_of_the_pages())
def test_a_reproduce_command_of_the_pages_runs_as_printed(
    module, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    dry = [] if "--dry_run" in flags else ["--dry_run"]
    monkeypatch.setattr("sys.argv", [module, *shlex.split(flags), *dry, "--out", str(tmp_path)])
    assert import_module(module).main() == 0
    assert "to run: " in capsys.readouterr().out and not [*tmp_path.iterdir()]


def test_the_pages_have_reproduce_commands():
    assert len(lines_of_the_pages()) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("module, flags", [c for c in COMMANDS if "RUN..." not in c[1]])
def test_a_command_of_the_page_can_be_called(module, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    more, expected, message = ENDS[module]
    words = shlex.split(flags) + more
    if "reproduce" in module:  # finished runs would be missing from the plan
        words += ["--out", str(tmp_path)]
    if "table2_b" in flags and "reproduce" in module:  # a plan needs no weights
        words += ["--extra", f"--pretrained_model_root {tmp_path / 'absent'}"]
    monkeypatch.setattr("sys.argv", [module, *words])
    try:
        code = import_module(module).main() or 0
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == expected and message in printed.out + printed.err


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Table 2", "Figure 3", "Figure 7", "Figure 8"])
def test_the_hours_of_a_section_are_those_of_the_dry_run(title, tmp_path, monkeypatch, capsys):
    """With one seed, as in the command, and with five."""
    monkeypatch.chdir(ROOT)
    (command,) = [(module, flags) for module, flags in COMMANDS if flags.strip() in SECTIONS[title]]
    module, flags = command
    absent = f"--pretrained_model_root {tmp_path / 'absent'}"
    hours = []
    for seeds in (["0"], ["0", "1", "2", "3", "4"]):
        words = shlex.split(flags.replace("--seeds 0", "")) + ["--seeds", *seeds, "--dry_run"]
        monkeypatch.setattr(
            "sys.argv", [module, *words, "--output_dir", str(tmp_path), "--extra", absent]
        )
        import_module(module).main()
        (found,) = re.findall(
            r"^([\d,]+) GPU-hours at 600 TFLOP/s", capsys.readouterr().out, re.MULTILINE
        )
        hours.append(found)
    one, five = hours
    assert re.search(
        rf"GPU-hours: {one} with one seed \(\d+ runs\), {five} with five", SECTIONS[title]
    )


def test_every_measured_table_and_figure_has_a_section():
    expected = {
        "Table 2",
        "Table 3",
        *(f"Figure {n}" for n in (3, 4, 7, 8, 9)),
        "Figures 6 and 10 to 12",
    }
    assert expected == SECTIONS.keys() and len(COMMANDS) > 12


@pytest.mark.parametrize("sampler", ["sage_grpo", "cps"])
def test_the_hours_of_a_run_are_those_of_the_plan(sampler, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = " ".join(TEXT.split())
    for hours, flags in (("148 GPU-hours with an anchor", []), ("131 GPU-hours without", NO_KL)):
        words = ["--config", "configs/paper/table2_b_8gpu.yaml", "--sde_type", sampler, *flags]
        config = parse(words).config
        run = PlannedRun(config, 8, released_sizes("480p_t2v"), hardware=Hardware())
        assert hours in text and hours.split()[0] == f"{whole_run(run).gpu_hours:.0f}"
