"""docs/reproduce.md: its commands run as printed, and its hours are those of the plan."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^(?:python|torchrun --nproc_per_node=8) -m ((?:scripts|examples)\.\w+) ([^#\n]*--[^#\n]*)",
    TEXT.replace("\\\n", " "),
    re.MULTILINE,
)
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
