"""Every kind of run, made short, says in its files what it did: the audit recomputes it."""

import csv
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from hyvideo.settings.command_line import load_config
from scripts import improve
from scripts.audit import outputs
from scripts.audit.__main__ import audit_of, main
from scripts.audit.run import read_table
from scripts.audit.statements import AGREES, DIFFERS, UNCHECKED
from tests.audit.cases import ALL, FPS, UNCHECKED_STATEMENTS, cases
from tests.forked import ROOT, python
from tests.net.cases import ITERATIONS, Case, flags
from tests.rated_pairs import PROMPTS, write_clip, write_pairs
from tests.shallow import write_trained

MISSING = "not known before the inputs are written"
NAMES = list(cases(MISSING, MISSING))
VIDEOS = [  # prompt, score, keep: four of the best are kept of the first prompt, two of the second
    (PROMPTS[number % 2], round(0.05 + number * 7 % 10 / 10, 2), int(number != 3))
    for number in range(10)
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """CSV files of rated pairs and of scored videos."""
    folder = tmp_path_factory.mktemp("inputs")
    pairs = write_pairs(folder / "pairs", fps=FPS)
    with (folder / "videos.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "video", "score", "keep"])
        for number, (prompt, score, keep) in enumerate(VIDEOS):
            write_clip(folder / f"{number}.mp4", 100 + number, fps=FPS)
            writer.writerow([prompt, f"{number}.mp4", score, keep])
    return pairs, folder / "videos.csv"


def train(case: Case, folder) -> None:
    """Train a case on two blocks of its miniature, with each of its ranks in a process."""
    config = f"configs/{case.config}.yaml"
    source = load_config(str(ROOT / config)).model.pretrained_model_root
    root = write_trained(folder.parent / "ckpts", source)
    for iterations in (*case.stops_after, ITERATIONS):
        command = ["post_train.py", "--config", config, *ALL, *case.flags]
        command += flags(output_dir=folder, pretrained_model_root=root, max_steps=iterations)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(case.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            if case.ranks > 1:
                environment |= {name: str(value) for name, value in place.items()}
            ranks.append(
                subprocess.Popen(
                    [python(), *command],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        texts = [rank.communicate(timeout=500)[0] for rank in ranks]
        # 3: so short a run may look like reward hacking
        assert all(rank.returncode in (0, 3) for rank in ranks), texts[0][-2000:]


@pytest.fixture(scope="module")
def audited(inputs, tmp_path_factory):
    """The folder of a run whose files agree."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    train(cases(*inputs)["resumed"], folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_run_did_what_its_settings_say(name, inputs, tmp_path, monkeypatch, request):
    monkeypatch.chdir(ROOT)
    if name == "resumed":
        folder = request.getfixturevalue("audited")
    else:
        folder = tmp_path / "run"
        train(cases(*inputs)[name], folder)
    found = audit_of(folder).statements
    assert not [each for each in found if each.verdict == DIFFERS]
    assert sum(each.verdict == AGREES for each in found) >= 20
    unchecked = [f"{each.text}: {each.because}" for each in found if each.verdict == UNCHECKED]
    assert len(unchecked) == UNCHECKED_STATEMENTS.get(name, 0), unchecked


@pytest.mark.system
@pytest.mark.parametrize("name", ["one update", "lora"])
def test_what_leaves_a_run_is_what_it_validated(name, inputs, tmp_path, monkeypatch):
    """Saved videos are scored again, and the validation's are made again from the checkpoint and
    from its export.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", python())
    train(cases(*inputs)[name], tmp_path / "run")
    found = audit_of(tmp_path / "run", score=True, sample=True).statements
    made = [each for each in found if each.topic == outputs.TOPIC]
    assert not [f"{each.text}: {each.because}" for each in made if each.verdict != AGREES]
    assert len(made) == 4


@pytest.mark.system
def test_rounds_of_improvement_train_on_their_own_best_videos(tmp_path, forked_programs):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\na red circle moves up\na blue square moves left\n")
    folder = tmp_path / "improved"
    words = ["--config", "configs/miniature_sft.yaml", "--prompts_csv", prompts, "--rounds", 2]
    words += ["--num_videos", 3, "--guidance_scale", 2.5, "--improve_dir", folder, *ALL]
    words += flags(valid_video_csv="tests/audit/valid.csv", max_steps=2, batch_size=4)
    assert improve.main(list(map(str, words))) == 0
    audit = audit_of(folder)
    assert not audit.differs, audit.as_text()
    topics = {each.topic for each in audit.statements if each.verdict == AGREES}
    assert {"Improvement", "round2/run: Given videos", "round1/run: Update"} <= topics


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("rollouts", lambda line: line["rollouts"]["advantage"].reverse()),
        ("rollouts", lambda line: line["rollouts"]["prompt"].reverse()),
        ("updates", lambda line: line["updates"][1].update(lr=6e-4)),
        ("updates", lambda line: line["updates"][1].update(kl_coef=line["updates"][0]["kl_coef"])),
        ("schedule", lambda line: line["schedule"]["weights"].reverse()),
    ],
)
def test_a_changed_record_differs(line, change, audited, capsys):
    """An audit that finds nothing would agree with everything."""
    file = audited / "audit.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    before = json.dumps(lines[1][line])
    change(lines[1])
    assert json.dumps(lines[1][line]) != before
    kept = file.read_text()
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert main([str(audited)]) == 1
    assert "differs" in capsys.readouterr().out
    assert any(
        row["verdict"] == DIFFERS
        for row in json.loads((audited / "audit.json").read_text())["statements"]
    )
    file.write_text(kept)


def test_a_run_without_its_record_says_what_cannot_be_checked(audited, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = audited / "audit.jsonl"
    text = file.read_text()
    file.unlink()
    found = audit_of(audited).statements
    file.write_text(text)
    assert not [each for each in found if each.verdict == DIFFERS]
    assert sum(each.verdict == AGREES for each in found) >= 8
    reasons = [each.because for each in found if each.verdict == UNCHECKED]
    others = [reason for reason in reasons if "no audit.jsonl" not in reason]
    assert len(reasons) > 20 and len(others) == 1 and "no two checkpoints" in others[0]


def change_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_lines(file, change):
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def raise_gain(folder):
    """Change the gain that the page prints, and leave its data as they are."""
    file = folder / "report.html"
    text = file.read_text()
    assert text.count('<p class="gain">') == 1
    file.write_text(re.sub('(<p class="gain">)[^ ]+', r"\1+0.987", text))


def swap(first, second):
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


CHANGES = {
    "the settings of the run are the same in both files": lambda run: change_json(
        run / "run.json", lambda record: record["settings"].update(eta=0.123)
    ),
    "saved videos are there": lambda run: (run / "samples/000003/001.mp4").unlink(),
    "saved videos are there, ": lambda run: swap(
        run / "samples/000003/001.mp4", run / "rollouts/000002/000.mp4"
    ),
    "the iterations of audit.jsonl": lambda run: change_lines(
        run / "metrics.jsonl", lambda lines: lines.append(lines[-1])
    ),
    "the gradient norm": lambda run: change_lines(
        run / "audit.jsonl", lambda lines: lines[1]["updates"][0].update(grad_norm=math.inf)
    ),
    # the difference is found before the value that is missing
    "mean, spread within groups": lambda run: change_lines(
        run / "metrics.jsonl",
        lambda lines: (lines[1].update({"reward/mean": 9.0}), lines[2].pop("reward/missing")),
    ),
    "the KL coefficient": lambda run: change_json(
        run / "checkpoints/000003/state.json",
        lambda state: state["kl_coefficient"].update(value=0.123),
    ),
    "checkpoints are of this run": lambda run: swap(
        run / "checkpoints/000003/tensors/__0_0.distcp",
        run / "checkpoints/000002/tensors/__0_0.distcp",
    ),
    "curves and gain of the report": raise_gain,
}


@pytest.mark.parametrize("text", CHANGES)
def test_changed_files_differ(text, audited, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "a folder with another name"
    shutil.copytree(audited, folder)
    CHANGES[text](folder)
    found = [each for each in audit_of(folder).statements if each.text.startswith(text.strip())]
    assert [each.verdict for each in found] == [DIFFERS], found


def test_a_run_that_was_changed_by_nobody_agrees_in_each_state(audited, tmp_path, monkeypatch):
    """A run that is killed, begins with the checkpoint of another one, or goes on without record."""
    monkeypatch.chdir(ROOT)
    states = {
        "killed": ("metrics.jsonl", lambda text: text[:-100]),
        "without record at the end": (
            "audit.jsonl",
            lambda text: "".join(text.splitlines(True)[:2]),
        ),
        "with record from iteration 2 on": (
            "audit.jsonl",
            lambda text: "".join(text.splitlines(True)[1:]),
        ),
    }
    for name, (file, change) in states.items():
        folder = tmp_path / name
        shutil.copytree(audited, folder)
        (folder / file).write_text(change((folder / file).read_text()))
        if name == "without record at the end":
            for path in (folder / "config.yaml", folder / "run.json"):
                text = path.read_text()
                changed = re.sub('(record"?: "?)all', r"\1none", text)
                assert changed != text
                path.write_text(changed)
        (folder / "report.html").unlink()
        found = audit_of(folder)
        assert not found.differs, found.as_text()
        assert sum(each.verdict == AGREES for each in found.statements) >= 20


def test_prompts_are_read_from_each_kind_of_table(tmp_path):
    prompts = ['a "red" circle, moving', "a blue square; still"]
    files = {
        "lines.txt": "\n".join(["", *prompts]),
        "table.csv": 'Prompt,seed\n"a ""red"" circle, moving",7\n,\na blue square; still,\n',
        "table.tsv": 'prompt\tseed\n"a ""red"" circle, moving"\t7\na blue square; still\t\n',
        "list.json": json.dumps([{"prompt": prompts[0], "seed": 7}, {"prompt": prompts[1]}]),
        "lines.jsonl": json.dumps({"prompt": prompts[0], "seed": 7})
        + "\n"
        + json.dumps(prompts[1]),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        rows = read_table(tmp_path / name, "prompt")
        assert [row["prompt"].strip() for row in rows] == prompts, name
        assert name == "lines.txt" or rows[0]["seed"] == "7"


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path)])
    assert error.value.code == 2 and str(tmp_path) in capsys.readouterr().err
