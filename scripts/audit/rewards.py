"""Rewards, advantages and groups, from the records of rollouts and validations."""

import math
from collections.abc import Iterable
from statistics import fmean

from scripts.audit import formulas
from scripts.audit.run import Run
from scripts.audit.statements import Audit, CannotCheck, Comparison, Inapplicable

REWARDS, ADVANTAGES = "Rewards", "Advantages"
VIDEOALIGN = ("VQ", "MQ", "TA")


def audit_rewards(run: Run, audit: Audit) -> None:
    scores = "rollouts/ and samples/, scores.json"
    with audit.compare(REWARDS, "the reward is the weighted sum of its scores", scores) as rows:
        for folder, entries in run.scores.items():
            for entry in entries:
                where = f"{folder.parent.name}/{folder.name}, number {entry['number']}"
                rows.number(where, weighted(entry, run.weights), entry["reward"])
    with audit.compare(REWARDS, "Overall is VQ + MQ + TA", scores) as rows:
        for folder, entries in run.scores.items():
            for entry in entries:
                if all(entry.get(name) is not None for name in VIDEOALIGN):
                    where = f"{folder.parent.name}/{folder.name}, number {entry['number']}"
                    rows.number(where, sum(entry[name] for name in VIDEOALIGN), entry["Overall"])
    with audit.compare(
        REWARDS, "a missing reward is null, has a reason and counts as missing", scores
    ) as rows:
        for folder, entries in run.scores.items():
            for entry in entries:
                where = f"{folder.parent.name}/{folder.name}, number {entry['number']}"
                rows.equal(where, entry["reward"] is None, entry["missing"])
                rows.equal(f"reason of {where}", entry["missing"], entry["reason"] is not None)
    _audit_ledger(run, audit)
    _audit_validations(run, audit)


def weighted(scores: dict, weights: dict[str, float]) -> float | None:
    """Return the reward of a video; None if one of the weighted scores is missing."""
    parts = [(weight, scores.get(name)) for name, weight in weights.items() if weight]
    if any(score is None for _, score in parts):
        return None
    return math.fsum(weight * score for weight, score in parts)


def _audit_ledger(run: Run, audit: Audit) -> None:
    """Rewards of every iteration, which audit.jsonl has."""
    files = "audit.jsonl"
    with audit.compare(
        REWARDS, "the rewards of every iteration are weighted sums of their scores", files, 1e-5
    ) as rows:
        for line in run.scored_lines:
            for entry in entries_of(line):
                where = f"iteration {line['iteration']}, rollout {entry['number']}"
                rows.number(where, weighted(_named(entry), run.weights), entry["reward"])
    text = "each video was scored with the prompt of its rollout, at the rate of the run"
    with audit.compare(REWARDS, text, files) as rows:
        for line in run.scored_lines:
            for entry in entries_of(line):
                if entry.get("asked"):
                    where = f"iteration {line['iteration']}, rollout {entry['number']}"
                    rows.equal(where, [entry["prompt"], run.get("fps")], entry["asked"])
    _audit_reward_metrics(run, audit)
    with audit.compare(
        REWARDS, "recorded rollouts have the rewards of their iteration", "rollouts/, audit.jsonl"
    ) as rows:
        if "reward" not in run.first_rollouts:
            raise Inapplicable
        by_iteration = {line["iteration"]: line for line in run.rollout_lines}
        for iteration, entries in run.rollout_scores.items():
            line = by_iteration.get(iteration)
            if line is None:
                continue
            of_number = {entry["number"]: entry for entry in entries_of(line)}
            for entry in entries:
                where = f"iteration {iteration}, rollout {entry['number']}"
                rows.number(where, of_number[entry["number"]].get("reward"), entry["reward"])
                rows.number(
                    f"advantage of {where}",
                    of_number[entry["number"]]["advantage"],
                    entry["advantage"],
                )


def _audit_reward_metrics(run: Run, audit: Audit) -> None:
    with audit.compare(
        REWARDS,
        "mean, spread within groups and number of missing rewards",
        "audit.jsonl, metrics.jsonl",
        1e-5,
    ) as rows:
        for line in run.scored_lines:
            found = run.by_iteration[line["iteration"]]
            where = f"iteration {line['iteration']}"
            rewards = line["rollouts"]["reward"]
            known = [value for value in rewards if value is not None]
            rows.number(
                f"reward/missing of {where}", len(rewards) - len(known), found["reward/missing"]
            )
            if known:
                rows.number(f"reward/mean of {where}", fmean(known), found["reward/mean"])
            spreads = [spread(group) for group in groups_of(line, "reward")]
            spreads = [value for value in spreads if value is not None]
            if spreads:
                rows.number(f"reward/std of {where}", fmean(spreads), found["reward/std"])
            for name in line["rollouts"]:
                metric = name.replace("score/", "reward/")
                if name.startswith("score/") and metric in found:
                    entries = [entry for entry in entries_of(line) if entry["reward"] is not None]
                    values = [entry[name] for entry in entries if entry[name] is not None]
                    if values:
                        rows.number(f"{metric} of {where}", fmean(values), found[metric])


def _audit_validations(run: Run, audit: Audit) -> None:
    with audit.compare(
        REWARDS,
        "means over validation videos, over seen and over unseen prompts",
        "samples/, metrics.jsonl",
        1e-5,
    ) as rows:
        try:
            trained = {_words(prompt.text) for prompt in run.prompts("prompts_csv")}
        except CannotCheck:
            trained = None
        if run.trains_given_videos:
            trained = None  # the prompts of the videos, not those of prompts_csv
        for iteration, entries in run.validations.items():
            found = run.by_iteration.get(iteration)
            if found is None:
                continue
            where = f"iteration {iteration}"
            known = [entry for entry in entries if entry["reward"] is not None]
            rows.number(
                f"validation/missing of {where}",
                len(entries) - len(known),
                found["validation/missing"],
            )
            parts = {"validation/reward": known}
            if trained is not None:
                parts["validation/seen/reward"] = [
                    entry for entry in known if _words(entry["prompt"]) in trained
                ]
                parts["validation/unseen/reward"] = [
                    entry for entry in known if _words(entry["prompt"]) not in trained
                ]
            for name, part in parts.items():
                if part and name in found:
                    mean = fmean(entry["reward"] for entry in part)
                    rows.number(f"{name} of {where}", mean, found[name])
            for name in run.weights:
                if f"validation/{name}" in found and known:
                    mean = fmean(entry[name] for entry in known)
                    rows.number(f"validation/{name} of {where}", mean, found[f"validation/{name}"])
    with audit.compare(
        REWARDS,
        "validation has its prompts in order, each as often as set",
        "samples/, valid_video_csv",
    ) as rows:
        if not run.get("valid_video_csv"):
            raise Inapplicable
        repeats = run.get("validation_repeats", 1)
        expected = [prompt for prompt in run.prompts("valid_video_csv") for _ in range(repeats)]
        for iteration, entries in run.validations.items():
            where = f"iteration {iteration}"
            rows.equal(f"number of videos of {where}", len(expected), len(entries))
            for row, (prompt, entry) in enumerate(zip(expected, entries)):
                rows.equal(f"{where}, video {row}", prompt.text, entry["prompt"])
                seed = prompt.seed
                if seed is None:
                    seed = run.get("validation_seed", 930)
                rows.equal(f"seed of {where}, video {row}", seed, entry["seed"])


def audit_advantages(run: Run, audit: Audit) -> None:
    text = "advantages follow from the rewards of their own group, with their clip"
    is_normalised = run.get("reward_normalization", "none") == "group"
    with audit.compare(ADVANTAGES, text, "audit.jsonl", 1e-5) as rows:
        for line in run.scored_lines:
            for group in groups(line):
                rewards = [entry["reward"] for entry in group]
                if is_normalised:
                    columns = [
                        [None if e["reward"] is None else e[f"score/{name}"] for e in group]
                        for name in run.weights
                    ]
                    rewards = formulas.normalised(columns, list(run.weights.values()))
                _check_advantages(rows, run, line["iteration"], group, rewards)
    text = "advantages of the saved rollouts follow from their rewards"
    with audit.compare(ADVANTAGES, text, "rollouts/", 1e-5) as rows:
        if "reward" not in run.first_rollouts:
            raise Inapplicable
        if is_normalised:
            raise CannotCheck("audit.jsonl has it, with the scores before normalisation")
        for iteration, entries in run.rollout_scores.items():
            for group in by_group(entries):
                rewards = [entry["reward"] for entry in group]
                _check_advantages(rows, run, iteration, group, rewards)
    text = "groups are complete, with one prompt each"
    with audit.compare(ADVANTAGES, text, "rollouts/") as rows:
        if "reward" not in run.first_rollouts:
            raise Inapplicable
        for iteration, entries in run.rollout_scores.items():
            check_groups(rows, run, f"iteration {iteration}", entries)
    with audit.compare(
        ADVANTAGES, "groups without a contrast are counted", "audit.jsonl, metrics.jsonl"
    ) as rows:
        for line in run.rollout_lines:
            found = run.by_iteration[line["iteration"]]
            if "advantage/zero_groups" not in found:
                raise Inapplicable
            count = 0
            for group in groups_of(line, "advantage"):
                known = [value for value in group if value is not None]
                count += bool(known) and not any(known)
            rows.number(f"iteration {line['iteration']}", count, found["advantage/zero_groups"])


def _check_advantages(
    rows: Comparison, run: Run, iteration: int, group: list[dict], rewards: list[float | None]
) -> None:
    """Compare the advantages of a group with those of its rewards."""
    expected = formulas.advantages(rewards, run.get("advantage_clip", 5.0))
    if run.get("ignore_rewards", False):
        expected = [None if value is None else 0.0 for value in expected]
    where = f"iteration {iteration}, group {group[0]['group']}"
    rows.numbers(where, expected, [entry["advantage"] for entry in group])


def check_groups(rows: Comparison, run: Run, where: str, entries: list[dict]) -> None:
    """Compare the rollouts of an iteration with the settings: complete groups of one prompt each."""
    rows.equal(f"rollouts of {where}", run.rollouts, len(entries))
    for group in by_group(entries):
        name = f"group {group[0]['group']} of {where}"
        members = sorted(entry["member"] for entry in group)
        rows.equal(name, list(range(run.group_size)), members)
        rows.equal(f"prompts of {name}", 1, len({entry["prompt"] for entry in group}))


# --- records --------------------------------------------------------------------------------------


def entries_of(line: dict) -> list[dict]:
    """Return the rollouts of a line of audit.jsonl, one dict each."""
    columns = line["rollouts"]
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def by_group(entries: list[dict]) -> list[list[dict]]:
    """Return rollouts by group, in order."""
    found: dict[int, list[dict]] = {}
    for entry in entries:
        found.setdefault(entry["group"], []).append(entry)
    return [found[number] for number in sorted(found)]


def groups(line: dict) -> list[list[dict]]:
    """Return the rollouts of a line of audit.jsonl by group, in order."""
    return by_group(entries_of(line))


def groups_of(line: dict, name: str) -> list[list[float | None]]:
    return [[entry[name] for entry in group] for group in groups(line)]


def spread(values: Iterable[float | None]) -> float | None:
    """Return the population standard deviation of the known values; None for fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    mean = fmean(known)
    return math.sqrt(fmean((value - mean) ** 2 for value in known))


def _named(entry: dict) -> dict:
    return {name.removeprefix("score/"): value for name, value in entry.items()}


def _words(prompt: str) -> str:
    return " ".join(prompt.split()).casefold()
