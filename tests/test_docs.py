"""Links of the README and docs/ exist, and their commands are valid.

Every command in a ```bash block, on an indented line or in `code` is parsed by the program itself,
and then stopped; post_train.py runs with --print_config. With --slow, commands that can run on a
CPU are run with small settings.
"""

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from hyvideo.settings import command_line
from tests.forked import ROOT, python
from tests.rated_pairs import write_clip

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)

# --- links ----------------------------------------------------------------------------------------


def anchors(text):
    """Return the anchors that GitHub generates for the headings of a page."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    slugs = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain]
    return {
        f"{slug}-{slugs[:i].count(slug)}" if slug in slugs[:i] else slug
        for i, slug in enumerate(slugs)
    }


def links(text):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [
        *re.findall(r"\]\(([^)\s]+)[^)]*\)", text),
        *re.findall(r"(?:src|href)=\"([^\"]+)\"", text),
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_of_a_page_has_a_target(name):
    dead = []
    for link in links(TEXTS[name]):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            dead.append(link)
    assert not dead


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command of a page: ``python -m scripts.export --merge`` is the program ``scripts.export``
    with one word.
    """

    page: str
    line: str
    program: str
    words: list[str]
    processes: int = 1
    is_mention: bool = False  # in running text, where flags may be omitted


LAUNCHERS = ("run_post_train.sh", "run_post_train_multinode.sh", "train_grpo.sh", "slurm.sbatch")
# Other programs, such as git, docker or cd, are not checked.
BEGINS = re.compile(
    r"(?:\$ |do )?((?:[A-Z_]+=\S+ +)*(?:(?:\S*/)?python3?|torchrun|bash|sbatch) +\S.*)"
)
OURS = re.compile(r"hyvideo\.|scripts\.|examples\.|tests\.|pytest$|-c$|.*\.(py|sh|sbatch)$")


def lines_of(text):
    """Yield the commands of a page, with continuation lines joined, and whether they are in running
    text.
    """
    blocks = [
        block
        for _, language, block in FENCE.findall(text)
        if language in ("bash", "sh", "shell", "console")
    ]
    rest = FENCE.sub("", text)
    blocks += re.findall(r"^(?: {4}|\t)(\S.*(?:\\\n.*)*)", rest, re.MULTILINE)
    for line in re.split(
        r"\n|; (?=do )|; *done|&&", "\n".join(re.sub(r" *\\\n\s*", " ", block) for block in blocks)
    ):
        if found := BEGINS.match(line.strip()):
            yield found[1], False
    for span in re.findall(r"`([^`\n]+)`", rest):
        if found := BEGINS.match(span):
            yield found[1], True


def words_of(line):
    """Return the words of a command up to a pipe, without optional ``[flags]``; variables are
    replaced by 0.
    """
    plain = re.sub(r"\[[^\]\"'{}]*\]", "", line)
    plain = re.sub(r"(--n(?:proc[_-]per[_-]node|nodes)) (?=\d)", r"\1=", plain)
    words = shlex.split(re.sub(r"\$\{?\w+\}?", "0", plain), comments=True)
    return [*itertools.takewhile(lambda word: not re.fullmatch(r"[|&]|\d?>.*", word), words)]


def command_of(page, line, is_mention):
    """Return the command of a line, or None if it does not start a program of this project."""
    words, variables = words_of(line), {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    launched, *words = words
    processes = 1
    if launched == "sbatch":
        processes = product(re.findall(r"--(?:nodes|gpus-per-node)=(\d+)", " ".join(words)))
        words = [
            word
            for word in words
            if not re.match(r"--(nodes|gpus-per-node|partition|time|account)=", word)
        ]
    elif launched == "bash":
        counts = [variables.get(name, 1) for name in ("NNODES", "NPROC_PER_NODE", "NPROC")]
        processes = product([*counts, variables.get("NODES", "").count(",") + 1])
    elif launched == "torchrun" or words[:2] == ["-m", "scripts.launch"]:
        words = words[2 * (launched != "torchrun") :]
        launcher_flags = [*itertools.takewhile(lambda word: re.match(r"--\w", word), words)]
        processes = product(
            re.findall(r"--n(?:proc[_-]per[_-]node|nodes)=(\d+)", " ".join(launcher_flags))
        )
        words = words[len(launcher_flags) :]
    first, *words = words[words[:1] == ["-m"] :] or [""]
    return Command(page, line, first, words, processes, is_mention) if OURS.match(first) else None


def product(numbers):
    result = 1
    for number in numbers:
        result *= int(number)
    return result


def task_text(path):
    """Return the commands of a task of configs/cloud like a block of a page, with its variables."""
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = task["setup"] + task["run"]
    for name, value in task["envs"].items():
        commands = commands.replace(f"${name}", str(value))
    return f"```bash\n{commands}```\n"


TASKS = {
    str(path.relative_to(ROOT)): task_text(path) for path in (ROOT / "configs/cloud").glob("*.yaml")
}
COMMANDS = [
    command
    for page, text in (TEXTS | TASKS).items()
    for command in (command_of(page, *line) for line in dict.fromkeys(lines_of(text)))
    if command
]
DIFFERENT = {
    (c.program, *c.words, c.processes): c for c in sorted(COMMANDS, key=lambda c: not c.is_mention)
}.values()
PROMPTS = "assets/miniature/prompts/smoke.csv"


def videos_csv(folder):
    """Write a video and a CSV that names it, and return the path of the CSV."""
    write_clip(folder / "video.mp4", 0, (9, 32, 32))
    path = folder / "videos.csv"
    path.write_text("prompt,video\na red circle moves up,video.mp4\n")
    return str(path)


def pairs_csv(folder):
    """Write a rated pair of videos of the size of the miniature, and return its CSV file."""
    for number in range(2):
        write_clip(folder / f"{number}.mp4", number, (9, 32, 32))
    path = folder / "pairs.csv"
    path.write_text(
        "prompt,first,second,dimension,answer\na red circle moves up,0.mp4,1.mp4,Overall,first\n"
    )
    return str(path)


def recipes_file(folder):
    """Write the file of two configs that a page shows for scripts.compare_recipes."""
    blocks = [block for text in TEXTS.values() for *_, block in FENCE.findall(text)]
    (block,) = [block for block in blocks if block.startswith("sage: configs/")]
    path = folder / "compare.yaml"
    path.write_text(block)
    return str(path)


def is_abbreviated(command, output):
    """Return whether a mention failed only because it omits flags or uses placeholders, not for an
    unknown flag.
    """
    is_incomplete = re.search("arguments are required|is required|needs a value", output)
    has_placeholder = any(re.search(r"\b[A-Z]{2,}\b", word) for word in command.words)
    is_wrong = re.search("unknown flag|unrecognized arguments", output)
    return command.is_mention and not is_wrong and (is_incomplete or has_placeholder)


class FlagsRead(Exception):
    """Raised once the program's parser has read all flags, to stop the program."""


def and_then_stop(parse):
    def stopped(*args, **options):
        parse(*args, **options)
        raise FlagsRead

    return stopped


def custom_code(place, folder):
    """Write the custom reward or sampler that a page shows to a file.

    FILE.py:CLASS stands for the first reward.
    """
    name, _, defined = place.partition(":")
    defined, *eta = defined.split(":")  # FILE.py:NAME:ETA of eta
    blocks = [block for text in TEXTS.values() for *_, block in FENCE.findall(text)]
    defined = (
        re.findall(r"class (\w+)\(Scorer\)", "".join(blocks))[0] if defined == "CLASS" else defined
    )
    matching = [block for block in blocks if re.search(rf"(class|def) {defined}\(", block)]
    assert matching, f"no page shows the code of {place}"
    (folder / Path(name).name).write_text(matching[0])
    return ":".join([str(folder / Path(name).name), defined, *eta])


def filled_in(words, folder):
    """Replace placeholders and files of users by files that exist."""
    filled = []
    for before, word in zip(["", *words], words):
        exists = ("/" in word and (ROOT / word).exists()) or word.startswith("configs/")
        if before == "--config" and not exists:
            word = "configs/miniature.yaml" if word.startswith("outputs/") else "configs/smoke.yaml"
        elif before == "--pairs_csv" and not exists:
            word = pairs_csv(folder)
        elif word == "compare.yaml":
            word = recipes_file(folder)
        elif before == "--videos_csv" and not exists:
            word = videos_csv(folder)
        elif re.fullmatch(r"\S+\.csv", word) and not exists:
            word = PROMPTS
        elif re.fullmatch(r"\S+\.py:\w+(:[\d.]+)?", word) and not (
            "/" in word and (ROOT / word.partition(":")[0]).exists()
        ):
            word = custom_code(word, folder)
        elif before == "--checkpoint_path" and re.fullmatch("[A-Z]+", word):
            word = "outputs/run/checkpoints/000001"
        filled += [] if word == "..." else [word]
    return filled


def as_run(command, folder):
    """Return module and arguments of a command; for a launcher, those of the program that it
    starts.
    """
    words, program = filled_in(command.words, folder), command.program
    if Path(program).name in LAUNCHERS:
        assert (ROOT / program).is_file()
        words = words if "--config" in words else ["--config", "configs/miniature.yaml", *words]
        program = "post_train.py"
    if program == "post_train.py":
        is_plan = "--print_config" in words or "--help" in words
        words = [word for word in words if word != "--print_config"]
        words += ["--print_config", "--output_dir", folder / "out"]
        if not is_plan and "--world_size" not in words:
            words += ["--world_size", command.processes]
    return program.removesuffix(".py").replace("/", "."), [str(word) for word in words]


@pytest.mark.parametrize(
    "command", DIFFERENT, ids=lambda command: f"{command.page}: {command.line[:60]}"
)
def test_a_command_of_a_page_is_valid(command, tmp_path, monkeypatch):
    program, words = as_run(command, tmp_path)
    if (
        program in ("pytest", "-c")
        or command.program.endswith(".sh")
        or program.startswith("tests.")
    ):
        paths = [command.program] if command.program.endswith(".sh") else []
        paths += [word.partition("::")[0] for word in words if word.startswith("tests/")]
        paths += [f"{program.replace('.', '/')}.py"] if program.startswith("tests.") else []
        assert not [path for path in paths if not (ROOT / path).exists()]
        if program == "download_weights":
            text = (ROOT / command.program).read_text()
            assert not [word for word in words if word.startswith("--") and f"{word})" not in text]
        if program == "-c":
            compile(words[0], command.page, "exec")
        return
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", and_then_stop(argparse.ArgumentParser.parse_args)
    )
    is_package = (ROOT / program.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{program}.__main__" if is_package else program)
    if program != "post_train" and getattr(module, "parse", None) is command_line.parse:
        monkeypatch.setattr(module, "parse", and_then_stop(command_line.parse))
    for name in {"saved_policy", "saved_lora"} & set(vars(module)):
        monkeypatch.setattr(module, name, Path)  # what earlier commands of the page have written
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = module.main()
        except SystemExit as end:
            code = end.code
        except FlagsRead:
            pass
    assert code == 0 or is_abbreviated(command, output.getvalue()), output.getvalue()


# --- commands that are run ------------------------------------------------------------------------

SMALL_RUN = (
    "--max_steps 1 --batch_size 16 --num_threads 1 --validation_steps 2 --validation_repeats 1 "
    "--report false"
)
SMALL_RUN = f"{SMALL_RUN} --valid_video_csv {PROMPTS} --validation_batch_size 8"
SMALL = {  # flags that shorten a command
    "post_train": SMALL_RUN,
    "generate": "--num_inference_steps 2",
    "scripts.evaluate": f"--valid_video_csv {PROMPTS} --validation_steps 2 --validation_repeats 1",
    "scripts.compare_policies": "--num_prompts 1 --validation_steps 2",
    "scripts.improve": f"--prompts_csv {PROMPTS} --num_videos 2 {SMALL_RUN}",
    "examples.gradient_norms": "--batch_size 8",
    "scripts.export": "--pretrained_model_root assets/miniature --transformer_version miniature",
    "scripts.reproduce_table2": "--dry_run",
    "scripts.figures paper": "--dry_run",
    "scripts.compare_recipes": "--dry_run",
    "scripts.benchmark": "--size 5 64 64 --num_layers 1 --num_pairs 1",
    "examples.grpo_from_scratch": "--iterations 1",
}
NOT_RUN = {  # programs that are not run here, with the reason
    "download_weights": "downloads gigabytes",
    "examples.miniature_from_scratch": "takes an hour",
    "examples/galaxies/run": "downloads a package; tests/examples/galaxies runs its programs",
    "pytest": "runs tests",
    "examples.simulated_study": "needs the videos of the command before it",
    "examples.size_preference": "draws 500 pairs",
    "scripts.benchmark_videos": "needs the official prompts or results",
    "scripts.figures gallery": "trains for half an hour",
    "scripts.gpu_check": "needs a GPU",
    "scripts.preference_study": "needs raters",
    "scripts.rate": "needs a person",
    "scripts.rehearse": "takes minutes, tests/rehearsal runs it",
    "scripts.reward_server": "serves until it is stopped",
    "scripts.train_reward": "needs ratings",
}
WORDS_NOT_RUN = {  # commands with these words are not run, with the reason
    "--rate": "needs a person",
    "examples/ocr_reward.py:Ocr": "needs prompts with text; tests/examples/test_ocr_reward.py runs it",
    "examples/custom_data.py:PromptFolders": "needs videos; test_objective_contract runs it",
    "outputs/policies/after": "needs the videos of the command before it",
    "0/lora": "needs a variable of the shell",
}
OUTPUTS = ("--output_dir", "--output_path")
LARGE = re.compile(
    r"(\./)?ckpts\b|first\.png|examples/mochi/mochi_8gpu|configs/(hunyuan|wan2|paper/)|(videoalign|hpsv3|vlm_judge|unified_reward|yes_no)$|.*\"path\":|.*\"remote\""
    r"|--(resolution|rewrite|url|gradients|scores)$"
)


def name_of(command):
    """Return the program of a command, with the part of it that the first word names."""
    program = command.program.removesuffix(".py").removesuffix(".sh")
    return f"{program} {command.words[0]}" if program == "scripts.figures" else program


def why_not_run(command):
    """Return the reason for not running a command on a CPU, or an empty string."""
    program = name_of(command)
    large = [word for word in command.words if LARGE.match(word)]
    if program in NOT_RUN or program.startswith(("scripts/", "tests.")):
        return NOT_RUN.get(program, "a tool, or a launcher of a program that is run here")
    reasons = [WORDS_NOT_RUN[word] for word in command.words if word in WORDS_NOT_RUN]
    if reasons:
        return reasons[0]
    if "configs/miniature_dpo.yaml" in command.words and "--pairs_csv" not in command.words:
        return "needs the ratings of the commands before it"
    if (
        "--dry_run" in SMALL.get(program, "")
        or program == "-c"
        or "--print_config" in command.words
    ):
        return ""  # computed from settings alone
    is_large = command.processes > 1 or large
    return "needs GPUs, weights or a service" if is_large else ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that returns the output folder of a LoRA run of one iteration with a config."""

    @cache
    def run_of(config):
        folder = tmp_path_factory.mktemp("trained") / "run"
        flags = ["--config", f"configs/{config}.yaml", *SMALL_RUN.split(), "--lora_rank", "2"]
        flags += ["--output_dir", str(folder)]
        subprocess.run(
            [python(), "post_train.py", *flags], cwd=ROOT, check=True, capture_output=True
        )
        return folder

    return run_of


def write_tiny_checkpoint(box):
    """Run the Python code of a page that writes the folder ``outputs/tiny``."""
    (code,) = [
        block
        for text in TEXTS.values()
        for _, language, block in FENCE.findall(text)
        if language == "python" and '"outputs/tiny"' in block
    ]
    subprocess.run([python(), "-c", code], cwd=box, check=True, capture_output=True)


def placed(word, box, trained):
    """Copy a ``trained`` run to the path that a word of a command refers to, or write the tiny
    checkpoint there, and return the word.
    """
    if word == "outputs/tiny":
        write_tiny_checkpoint(box)
        return word
    name, _, path = word.rpartition("=")
    path = "outputs/run" if path in ("RUN", "RUN...") else path
    run = path.split("/checkpoints/")[0].removesuffix("/config.yaml")
    run = "outputs/run" if run == "outputs" else run
    if not run.startswith("outputs/") or word.startswith("{"):
        return word
    run = f"{run}/one" if run.endswith("/cells") else run
    if not (box / run).exists():
        config = "miniature_i2v" if run.endswith("_i2v") else "miniature"
        shutil.copytree(trained(config), box / run)
    if (number := re.search(r"/checkpoints/(\d+)", path)) and not (
        box / run / "checkpoints" / number[1]
    ).exists():
        (box / run / "checkpoints" / number[1]).symlink_to("000001")
    return f"{name}={path}" if name else path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [c for c in DIFFERENT if not why_not_run(c)],
    ids=lambda c: f"{c.page}: {c.line[:60]}",
)
def test_a_command_that_needs_no_gpu_runs(command, tmp_path, trained):
    box = tmp_path / "repository"
    box.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git"):
            (box / path.name).symlink_to(path)
    if only_prints := "--print_config" in command.words or "--help" in command.words:
        words = filled_in(command.words, tmp_path)
    else:
        words = [
            word
            for word in filled_in(command.words, tmp_path)
            if word not in ("--only_table", "--only_figure")
        ]
        words = [
            w if before in OUTPUTS else placed(w, box, trained)
            for before, w in zip(["", *words], words)
        ]
        words = ["assets/miniature" if word.split("/")[0] == "ckpts" else word for word in words]
    program = command.program
    if Path(program).name in LAUNCHERS:  # tests/scripts/test_launchers.py starts them
        program = "post_train.py"
        words = words if "--config" in words else ["--config", "configs/miniature.yaml", *words]
    name = name_of(command) if program == command.program else "post_train"
    small = "" if only_prints else SMALL.get(name, "")
    start = [program] if program.endswith(".py") or program == "-c" else ["-m", program]
    arguments = [python(), *start, *words, *small.split()]
    result = subprocess.run(
        arguments, cwd=box, capture_output=True, text=True, env=os.environ, timeout=600
    )
    assert result.returncode == 0 or is_abbreviated(command, result.stderr), (
        result.stdout + result.stderr
    )
