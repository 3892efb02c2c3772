"""Prompts, groups, noise and trained steps of the rollouts, from audit.jsonl."""

import json
import math
from collections import Counter
from statistics import fmean

from scripts.audit import chance, formulas
from scripts.audit.rewards import check_groups, entries_of, groups
from scripts.audit.run import Prompt, Run
from scripts.audit.statements import Audit, CannotCheck, Inapplicable

TOPIC = "Batch and seeds"
HIGHEST, LOWEST = 0.999, 0.02  # noise levels that objectives on levels train
ROUNDING = 1e-6  # of noise levels in float32


def audit_rollouts(run: Run, audit: Audit) -> None:
    text = "an iteration has the rollouts of the settings, in complete groups"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml") as rows:
        for line in run.lines:
            check_groups(rows, run, f"iteration {line['iteration']}", entries_of(line))
    files = "audit.jsonl, metrics.jsonl"
    with audit.compare(
        TOPIC, "the iterations of audit.jsonl are those of metrics.jsonl", files
    ) as rows:
        found = [line["iteration"] for line in run.lines]
        # a run that began before audit.jsonl was recorded, or goes on with --record none
        last = found[-1] if run.get("record") == "none" else run.last_iteration
        measured = [line["iteration"] for line in run.metrics]
        rows.equal("iterations", [i for i in measured if found[0] <= i <= last], found)
        rows.equal("iterations, in order and once", sorted(set(measured)), measured)
    _audit_prompts(run, audit)
    _audit_noise(run, audit)
    _audit_updates(run, audit)
    _audit_trained(run, audit)


def _audit_prompts(run: Run, audit: Audit) -> None:
    text = "each prompt once per epoch, in the order of the seed"
    with audit.compare(TOPIC, text, "audit.jsonl, prompts_csv") as rows:
        prompts = run.prompts("prompts_csv") if not run.trains_given_videos else None
        for line in run.rollout_lines:
            found = groups(line)
            places = chance.turns(len(prompts), len(found), line["iteration"], run.get("seed", 42))
            for number, (place, group) in enumerate(zip(places, found)):
                where = f"iteration {line['iteration']}, group {number}"
                rows.equal(where, prompts[place].digest, group[0]["prompt"])
    text = "recorded rollouts have the prompts of their groups"
    with audit.compare(TOPIC, text, "rollouts/, audit.jsonl") as rows:
        if "reward" not in run.first_rollouts:
            raise Inapplicable
        by_iteration = {line["iteration"]: line for line in run.rollout_lines}
        for iteration, entries in run.rollout_scores.items():
            if iteration not in by_iteration:
                continue
            of_number = {e["number"]: e for e in entries_of(by_iteration[iteration])}
            for entry in entries:
                where = f"iteration {iteration}, rollout {entry['number']}"
                digest = Prompt(entry["prompt"], None).digest
                rows.equal(where, of_number[entry["number"]]["prompt"], digest)


def _audit_noise(run: Run, audit: Audit) -> None:
    seed = run.get("seed", 42)
    shares = run.get("use_same_noise", False)
    text = "the initial noise of a rollout is that of seed, iteration, group and member"
    drawn: Counter[float] = Counter()
    with audit.compare(TOPIC, text, "audit.jsonl", 1e-7) as rows:
        for line in run.rollout_lines:
            for entry in entries_of(line):
                member = 0 if shares else entry["member"]
                key = (seed, "initial noise", line["iteration"], entry["group"], member)
                where = f"iteration {line['iteration']}, rollout {entry['number']}"
                rows.number(where, chance.first_normal(*key), entry["noise"])
                if member == entry["member"]:
                    drawn[entry["noise"]] += 1
    repeats = run.get("validation_repeats", 1)
    validated: dict[int, list[float]] = {}
    text = "the noise of a validation video is that of its seed, prompt and repeat"
    with audit.compare(TOPIC, text, "samples/", 1e-7) as rows:
        if not run.get("valid_video_csv"):
            raise Inapplicable
        requests = [prompt for prompt in run.prompts("valid_video_csv") for _ in range(repeats)]
        for iteration, entries in run.validations.items():
            file = run.folder / "samples" / f"{iteration:06d}" / "noise.json"
            if not file.is_file():
                raise CannotCheck("the validation was made before its noise was recorded")
            validated[iteration] = json.loads(file.read_text())
            rows.equal(f"videos of {iteration}", len(entries), len(validated[iteration]))
            for entry, request, noise in zip(entries, requests, validated[iteration]):
                place, repeat = divmod(entry["number"], repeats)
                key: tuple = (run.get("validation_seed", 930), "validation noise", place, repeat)
                if request.seed is not None:
                    key = (request.seed, "validation noise", repeat)
                where = f"iteration {iteration}, video {entry['number']}"
                rows.number(where, chance.first_normal(*key), noise)
    text = "no two rollouts share their noise, nor do rollouts and validation"
    with audit.compare(TOPIC, text, "audit.jsonl, samples/") as rows:
        if not run.rollout_lines or not drawn:
            raise CannotCheck("audit.jsonl has no noise")
        rows.equal("rollouts with the noise of another", 0, sum(n - 1 for n in drawn.values()))
        for iteration, noises in validated.items():
            common = len(drawn.keys() & set(noises))
            rows.equal(f"rollouts with noise of validation {iteration}", 0, common)


def _audit_updates(run: Run, audit: Audit) -> None:
    text = "every scored rollout is in exactly one update of its iteration, groups undivided"
    with audit.compare(TOPIC, text, "audit.jsonl") as rows:
        for line in run.lines:
            where = f"iteration {line['iteration']}"
            entries = entries_of(line)
            scored = {e["number"] for e in entries if e["advantage"] is not None}
            trained = Counter(number for update in line["updates"] for number in update["rollouts"])
            if without := skipped_before(run, line):
                if without >= run.updates_per_iteration:
                    rows.equal(f"updates of {where}", [], line["updates"])
                    continue
                scored &= trained.keys()  # updates without a signal make no passes
            rows.equal(where, scored, set(trained))
            rows.equal(f"repeats of {where}", 0, sum(n - 1 for n in trained.values()))
            group = {e["number"]: e["group"] for e in entries}
            for number, update in enumerate(line["updates"]):
                own = {group[each] for each in update["rollouts"]}
                whole = {each for each in scored if group[each] in own}
                rows.equal(f"groups of update {number} of {where}", whole, set(update["rollouts"]))
    text = "an update has as many terms as its rollouts have trained steps or levels"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml") as rows:
        for line in run.lines:
            count = trained_per_rollout(run, line)
            for number, update in enumerate(line["updates"]):
                where = f"iteration {line['iteration']}, update {number}"
                rows.equal(where, count * len(update["rollouts"]), update["num_terms"])
                if "passes" not in update:
                    continue
                terms = [
                    (rollout, trained)
                    for each in update["passes"]
                    for rollout, trained in zip(each["rollout"], each["trained"])
                ]
                rows.equal(f"terms of {where}", update["num_terms"], len(terms))
                per_rollout = Counter(rollout for rollout, _ in terms)
                rows.equal(f"rollouts of {where}", set(update["rollouts"]), set(per_rollout))
                rows.equal(f"terms per rollout of {where}", {count}, set(per_rollout.values()))


def skipped_before(run: Run, line: dict) -> int:
    """Return the updates of an iteration that were left out because rewards were equal."""
    metrics = run.by_iteration.get(line["iteration"], {})
    return int(metrics.get("update/without_signal") or 0)


def noisy_steps(run: Run, levels: list[float]) -> list[int]:
    """Return the steps that have noise without an SDE window."""
    stds = stds_of(run, run.get("sde_type", "sage_grpo"), levels, eta_of(run))
    return [step for step, std in enumerate(stds) if std > 0]


def stds_of(run: Run, sampler: str, levels: list[float], eta: float) -> list[float]:
    """Return the standard deviation of each step of a sampler without an SDE window."""
    stds = []
    for sigma, after in zip(levels, levels[1:]):
        made = formulas.step_of(sampler, sigma, after, eta, levels[1])
        if made is None:
            raise CannotCheck(f"the audit has no formula of sampler {sampler}")
        stds.append(made[0])
    if run.get("last_step") == "deterministic":
        stds[-1] = 0.0
    return stds


def eta_of(run: Run) -> float:
    """Return the noise scale; for SAMPLER:ETA, the one with the same sum of variances."""
    eta = run.get("eta", 0.5)
    if not isinstance(eta, str):
        return eta
    target, _, target_eta = eta.rpartition(":")
    wanted = math.fsum(std**2 for std in stds_of(run, target, levels_of(run), float(target_eta)))
    low, high = 0.0, 1.0 if run.get("sde_type") == "cps" else 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        if total_variance(run, middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def total_variance(run: Run, eta: float) -> float:
    """Return the sum of the variances of the run's steps, with an SDE window the mean of its positions."""
    stds = stds_of(run, run.get("sde_type", "sage_grpo"), levels_of(run), eta)
    noisy = [step for step, std in enumerate(stds) if std > 0]
    text = run.get("sde_window", "")
    length = len(formulas.window(text, noisy, 1, lambda count: 0))
    positions = [
        formulas.window(text, noisy, start + 1, lambda count, start=start: start)
        for start in range(len(noisy) - length + 1)
    ]
    return fmean(math.fsum(stds[step] ** 2 for step in position) for position in positions)


def levels_of(run: Run) -> list[float]:
    shift = run.get("shift")
    if shift is None and not run.get("sigmas"):
        raise CannotCheck("the run has no shift")
    return formulas.noise_levels(run.get("grpo_sampling_steps", 20), shift, run.get("sigmas"))


def steps_with_noise(run: Run, iteration: int) -> list[int]:
    """Return the steps with noise of an iteration, those of its SDE window."""
    random = chance.generator(run.get("seed", 42), "sde window", iteration)
    return formulas.window(
        run.get("sde_window", ""),
        noisy_steps(run, levels_of(run)),
        iteration,
        lambda count: int(random.integers(count)),
    )


def trained_per_rollout(run: Run, line: dict) -> int:
    """Return the number of trained steps or levels of each rollout."""
    if run.objective == "grpo":
        steps = steps_with_noise(run, line["iteration"])
        return max(1, round(len(steps) * run.get("timestep_fraction", 1.0)))
    if run.objective == "distill":
        return run.get("grpo_sampling_steps")
    if run.objective not in ("nft", "draft", "dpo", "sft"):
        raise CannotCheck(f"objective {run.objective} is the user's own")
    has_reward = run.get("reward_gradient_weight", 0.05 if run.objective == "draft" else 0.0) > 0
    return run.get("nft_levels", 4) + has_reward


def _audit_trained(run: Run, audit: Audit) -> None:
    text = "the noise levels of the steps, and the steps with noise, are those of the settings"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml", 1e-6) as rows:
        for line in run.rollout_lines:
            if run.objective == "distill" and not run.get("sigmas"):
                raise CannotCheck("a student's levels may be drawn for each iteration")
            schedule = line["schedule"]
            where = f"iteration {line['iteration']}"
            rows.numbers(f"sigmas of {where}", levels_of(run), schedule["sigmas"])
            if run.objective == "distill":
                continue
            found = [step for step, std in enumerate(schedule["std"]) if std > 0]
            rows.equal(
                f"steps with noise of {where}", steps_with_noise(run, line["iteration"]), found
            )
    text = "the standard deviation of each step follows from its sampler (docs/sde.md)"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml", 1e-6) as rows:
        for line in run.rollout_lines:
            if run.objective == "distill":
                raise Inapplicable
            levels = levels_of(run)
            steps = set(steps_with_noise(run, line["iteration"]))
            for step, std in enumerate(line["schedule"]["std"]):
                expected = 0.0
                if step in steps:
                    expected, _ = formulas.step_of(
                        run.get("sde_type", "sage_grpo"),
                        levels[step],
                        levels[step + 1],
                        eta_of(run),
                        levels[1],
                    )
                    if expected <= 1e-9 and run.get("reference_conventions"):
                        continue  # the last step of cps
                rows.number(f"iteration {line['iteration']}, step {step}", expected, std)
    text = "steps and levels are trained in the noise levels of the trained expert"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml") as rows:
        low, high = expert_interval(run)
        if (low, high) == (0.0, 1.0) or run.objective == "distill":
            raise Inapplicable
        for line in run.lines:
            for number, entry in enumerate(entries_of(line)):
                trained = entry.get("trained", [])
                if run.objective == "grpo":
                    trained = [line["schedule"]["sigmas"][step] for step in trained]
                where = f"iteration {line['iteration']}, rollout {number}"
                for level in trained:
                    is_inside = low - ROUNDING <= level <= high + ROUNDING
                    rows.equal(f"level {level:g} of {where}", True, is_inside)
    if run.objective == "grpo":
        _audit_visits(run, audit)
    else:
        _audit_levels(run, audit)


def _audit_visits(run: Run, audit: Audit) -> None:
    text = "the trained steps of each rollout, in the order of the seed"
    with audit.compare(TOPIC, text, "audit.jsonl") as rows:
        for line in run.rollout_lines:
            if "trained" not in line["rollouts"]:
                raise CannotCheck("--record all records it")
            steps = steps_with_noise(run, line["iteration"])
            count = trained_per_rollout(run, line)
            for entry in entries_of(line):
                place = (entry["group"], entry["member"])
                if run.get("guidance_interval") and run.get("cfg_scale", 1.0) > 1:
                    place = (0, 0)
                expected = steps[:count]
                if run.get("enable_timestep_permutation", True):
                    key = (run.get("seed", 42), "visiting order", line["iteration"], *place)
                    expected = [steps[i] for i in chance.order(len(steps), *key)[:count]]
                where = f"iteration {line['iteration']}, rollout {entry['number']}"
                rows.equal(where, expected, entry["trained"])
    text = "the steps with a ratio are those that were trained"
    with audit.compare(TOPIC, text, "metrics.jsonl, config.yaml") as rows:
        if run.get("timestep_fraction", 1.0) < 1:
            raise CannotCheck("timestep_fraction draws other steps for each rollout")
        for iteration, found in run.by_iteration.items():
            if "by_step/ratio_mean" in found:
                steps = [i for i, v in enumerate(found["by_step/ratio_mean"]) if v is not None]
                rows.equal(f"iteration {iteration}", steps_with_noise(run, iteration), steps)


def _audit_levels(run: Run, audit: Audit) -> None:
    text = "trained noise levels are one of each part of the expert's interval, as the seed draws"
    with audit.compare(TOPIC, text, "audit.jsonl", 1e-6) as rows:
        if run.objective not in ("nft", "draft", "dpo", "sft"):
            raise Inapplicable
        low, high = expert_interval(run)
        count = run.get("nft_levels", 4)
        for line in run.lines:
            if "trained" not in line["rollouts"]:
                raise CannotCheck("--record all records it")
            for entry in entries_of(line):
                member = 0 if run.objective == "dpo" else entry["member"]
                random = chance.generator(
                    run.get("seed", 42), "noise levels", line["iteration"], entry["group"], member
                )
                shares = (random.permutation(count) + random.random(count)) / count
                where = f"iteration {line['iteration']}, rollout {entry['number']}"
                for column, share in enumerate(shares):
                    start, end = (_unshifted(level, run.get("shift")) for level in (low, high))
                    level = formulas.shifted(start + (end - start) * share, run.get("shift"))
                    level = min(max(level, low, LOWEST), high, HIGHEST)
                    rows.number(f"{where}, level {column}", level, entry["trained"][column])


def _unshifted(level: float, shift: float) -> float:
    return level / (level + shift * (1 - level))


def expert_interval(run: Run) -> tuple[float, float]:
    """Return the noise levels of the trained expert: all of them for a single transformer."""
    boundary = run.lines[0]["schedule"].get("boundary")
    if boundary is None:
        return 0.0, 1.0
    if run.get("expert", "high") == "high":
        return boundary, 1.0
    return 0.0, math.nextafter(boundary, 0) - 10 * ROUNDING
