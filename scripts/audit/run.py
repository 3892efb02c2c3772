"""The files of a run, read as they are."""

import csv
import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from scripts.audit.statements import CannotCheck, Inapplicable

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = "metrics.jsonl"
LEDGER = "audit.jsonl"
WEIGHTS = {  # of the dimensions of VideoAlign, by name of a setting (arXiv:2603.21872, Section 4)
    "averaged": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "alignment": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
}
WEIGHTS |= {"A": WEIGHTS["averaged"], "B": WEIGHTS["alignment"]}


@dataclass(frozen=True)
class Prompt:
    """A row of a CSV of prompts."""

    text: str
    seed: int | None

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()


class Run:
    """A run in an output folder. Raises ValueError if there is none."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.yaml").is_file():
            raise ValueError(
                f"RUN must be the output_dir of a run, or a folder of scripts.improve or "
                f"scripts.compare_recipes; {folder} has no config.yaml"
            )
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or "environment" not in settings:
            raise ValueError(
                f"{folder / 'config.yaml'} lacks the `environment` that a run writes into it; RUN "
                "must be the output_dir of a run"
            )
        self.settings: dict[str, Any] = settings
        self.processes = self.settings["environment"]["processes"]
        self.metrics = read_lines(folder / ITERATIONS)
        self.by_iteration = Lines({line["iteration"]: line for line in self.metrics})
        self.all_lines = read_lines(folder / LEDGER)
        if self.all_lines and self.all_lines[-1]["iteration"] == self.last_iteration + 1:
            del self.all_lines[-1]  # of an iteration that is not finished, or was not validated

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; ``default`` where the run has none of this name."""
        value = self.settings.get(name)
        return default if value is None else value

    @property
    def objective(self) -> str:
        return self.get("objective", "grpo")

    @property
    def lines(self) -> list[dict]:
        """Lines of audit.jsonl. Raises CannotCheck if the run has none."""
        if not self.all_lines and not any(self.by_iteration):
            raise CannotCheck("the run has not finished an iteration")
        if not self.all_lines:
            raise CannotCheck(
                f"the run has no {LEDGER}: it was made by an earlier version, or with --record none"
            )
        return self.all_lines

    @property
    def rollout_lines(self) -> list[dict]:
        """Lines of audit.jsonl of a run that samples. Raises Inapplicable for other runs."""
        if self.trains_given_videos:
            raise Inapplicable
        return self.lines

    @property
    def scored_lines(self) -> list[dict]:
        """Lines of audit.jsonl of a run that scores its rollouts. Raises Inapplicable for others."""
        lines = self.rollout_lines
        if "reward" not in lines[0]["rollouts"]:
            raise Inapplicable
        return lines

    @property
    def first_rollouts(self) -> dict[str, list]:
        """Rollouts of the first line of audit.jsonl; of a run without it, those of scores.json."""
        if self.all_lines:
            return self.all_lines[0]["rollouts"]
        entries = next(iter(self.rollout_scores.values()), [])
        return {name: [entry[name] for entry in entries] for name in (entries or [{}])[0]}

    @property
    def trains_given_videos(self) -> bool:
        return self.objective in ("sft", "dpo")

    @property
    def replicas(self) -> int:
        return self.processes // self.get("sp_size", 1)

    @property
    def group_size(self) -> int:
        return 2 if self.objective == "dpo" else self.get("num_generations", 4)

    @property
    def rollouts(self) -> int:
        """Rollouts of an iteration."""
        batch = self.get("batch_size", 2) * self.get("gradient_accumulation_steps", 1)
        return self.replicas * batch

    @property
    def updates_per_iteration(self) -> int:
        return self.get("num_updates_per_rollout", 1)

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weight of each dimension in the reward."""
        given = self.get("reward_weights", "alignment")
        if given in WEIGHTS:
            weights = WEIGHTS[given]
            if not self._has_scores(weights):
                raise CannotCheck(
                    f"the preset {given} stands for the dimensions of a scorer of the user's own"
                )
            return weights
        found: dict[str, float] = {}
        for name, value in (json.loads(given) if isinstance(given, str) else given).items():
            parts = value if isinstance(value, dict) else {name: value}
            for dimension, weight in parts.items():
                short = name.rpartition(":")[2]
                is_shared = isinstance(value, dict) and self._has_scores([f"{short}/{dimension}"])
                found[f"{short}/{dimension}" if is_shared else dimension] = weight
        return {name: weight for name, weight in found.items() if weight}

    def _has_scores(self, names) -> bool:
        entries = [entry for entries in self.scores.values() for entry in entries]
        known = {name for entry in entries for name in entry}
        for line in self.all_lines[:1]:
            known |= {name.removeprefix("score/") for name in line["rollouts"]}
        return set(names) <= known

    @cached_property
    def scores(self) -> dict[Path, list[dict]]:
        """Entries of each scores.json of rollouts and validations, by its folder."""
        files = sorted(self.folder.glob("rollouts/*/scores.json"))
        files += sorted(self.folder.glob("samples/*/scores.json"))
        return {
            file.parent: read_json(file)
            for file in files
            if file.parent.name.isdecimal() and int(file.parent.name) <= self.last_iteration
        }

    @property
    def last_iteration(self) -> int:
        """The last iteration that is finished; 0 if none is."""
        return max(self.by_iteration, default=0)

    @property
    def rollout_scores(self) -> dict[int, list[dict]]:
        """Entries of the recorded rollouts, by iteration."""
        return self._scores_of("rollouts")

    @property
    def validations(self) -> dict[int, list[dict]]:
        """Entries of the validation videos, by iteration."""
        return self._scores_of("samples")

    def _scores_of(self, kind: str) -> dict[int, list[dict]]:
        return {
            int(path.name): entries
            for path, entries in self.scores.items()
            if path.parent.name == kind
        }

    def prompts(self, setting: str) -> list[Prompt]:
        """Return the rows of the files of a setting. Raises CannotCheck if one has moved."""
        rows: list[Prompt] = []
        for path in self.paths(setting):
            for row in read_table(path, "prompt"):
                seed = row.get("seed", "").strip().removesuffix(".0")
                rows.append(Prompt(row["prompt"].strip(), int(seed) if seed else None))
        return rows

    def paths(self, setting: str) -> list[Path]:
        """Return the files of a setting, which are relative to where the run was started."""
        given = self.get(setting, [])
        found = [self.find(path) for path in ([given] if isinstance(given, str) else given)]
        if not found:
            raise CannotCheck(f"the run has no {setting}")
        return found

    def find(self, path: str) -> Path:
        for start in (Path(), ROOT, self.folder):
            if (start / path).exists():
                return (start / path).absolute()
        raise CannotCheck(f"{path} is not there any more")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the checkpoints that are kept, by iteration."""
        return {
            int(path.name): path
            for path in sorted(self.folder.glob("checkpoints/*"))
            if path.name.isdecimal() and (path / "state.json").is_file()
            if int(path.name) in self.by_iteration
        }


class Lines(dict):
    """Lines of metrics.jsonl by iteration."""

    def __missing__(self, iteration: int):
        raise CannotCheck(f"{ITERATIONS} has no line of iteration {iteration}")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CannotCheck(f"{path} is not valid JSON ({error})") from error


def read_lines(path: Path) -> list[dict]:
    """Return the JSON objects of a file, without a last line that was cut."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"line {number} of {path} is not valid JSON ({error})") from error
    return found


def read_table(path: Path, *needed: str) -> list[dict[str, str]]:
    """Return the rows of a CSV, TSV, JSON, JSONL or text file that are not blank, with the names of
    their columns in lower case. Raises CannotCheck if a ``needed`` column is missing.
    """
    if path.is_dir():
        raise CannotCheck(f"the audit reads files, and {path} is a folder")
    text = path.read_text(encoding="utf-8-sig")
    kind = path.suffix.lower()
    if kind in (".json", ".jsonl", ".ndjson"):
        texts = [text] if kind == ".json" else [line for line in text.split("\n") if line.strip()]
        values = [json.loads(each) for each in texts]
        values = [row for each in values for row in (each if isinstance(each, list) else [each])]
        values = [{"prompt": each} if isinstance(each, str) else each for each in values]
        rows = [
            {name: "" if cell is None else str(cell) for name, cell in each.items()}
            for each in values
        ]
    elif kind == ".txt" and "prompt" not in text.lstrip().partition("\n")[0].lower():
        rows = [{"prompt": line} for line in text.split("\n")]
    else:
        mark = max(",;\t", key=text.lstrip().partition("\n")[0].count)
        rows = [
            {name: cell or "" for name, cell in row.items() if name is not None}
            for row in csv.DictReader(io.StringIO(text, newline=""), delimiter=mark)
        ]
    rows = [row for row in rows if any(cell.strip() for cell in row.values())]
    rows = [{name.strip().lower(): cell for name, cell in row.items()} for row in rows]
    for name in needed:
        if not all(name in row for row in rows):
            raise CannotCheck(f"{path} has no column `{name}`, and the audit knows no other names")
    return rows


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))
