"""Learning rate, KL coefficient, anchor, loss terms and forward passes of the updates."""

import math
from collections import defaultdict
from statistics import fmean

from scripts.audit import formulas
from scripts.audit.rewards import entries_of
from scripts.audit.rollouts import eta_of, levels_of, steps_with_noise, trained_per_rollout
from scripts.audit.run import Run, read_json
from scripts.audit.statements import Audit, CannotCheck, Inapplicable

TOPIC = "Update"


def audit_updates(run: Run, audit: Audit) -> None:
    _audit_counts(run, audit)
    _audit_rates(run, audit)
    _audit_mean_rates(run, audit)
    _audit_coefficient(run, audit)
    _audit_anchor(run, audit)
    _audit_weights(run, audit)
    _audit_terms(run, audit)
    _audit_forwards(run, audit)


def first_update(run: Run) -> int:
    """Return the updates before the first line of audit.jsonl: a run that began with the checkpoint
    of another one has more than none. Raises CannotCheck if the lines do not begin with the run.
    """
    first = run.lines[0]
    if first["iteration"] != 1:
        raise CannotCheck(
            f"audit.jsonl begins with iteration {first['iteration']}, so that what came before is "
            "not known"
        )
    return 0


def applied(line: dict) -> list[dict]:
    """Return the updates of a line that changed the weights."""
    return [update for update in line["updates"] if update["grad_norm"] is not None]


def _audit_counts(run: Run, audit: Audit) -> None:
    text = "updates are counted one by one, as many per iteration as set"
    with audit.compare(TOPIC, text, "audit.jsonl, metrics.jsonl") as rows:
        count = first_update(run)
        for line in run.lines:
            found = run.by_iteration[line["iteration"]]
            where = f"iteration {line['iteration']}"
            made = [update for update in line["updates"]]
            left_out = int(found.get("update/without_signal") or 0)
            scored = any(value is not None for value in line["rollouts"]["advantage"])
            if scored and run.rollouts // run.group_size >= run.updates_per_iteration:
                limit = run.updates_per_iteration
                rows.equal(f"updates of {where}", limit, len(made) + left_out)
            rows.equal(
                f"skipped of {where}", len(made) - len(applied(line)), found["update/skipped"]
            )
            for update in made:
                count += update["grad_norm"] is not None
                rows.equal(f"number of the update in {where}", count, update["update"])
            rows.equal(f"update of {where}", count, found["update"])


def _audit_rates(run: Run, audit: Audit) -> None:
    text = "the learning rate rises over the updates of its warm-up, then stays"
    with audit.compare(TOPIC, text, "audit.jsonl, metrics.jsonl", 1e-7) as rows:
        made = first_update(run)
        warmup = run.get("warmup_steps", 0)
        full = run.get("learning_rate", 1e-5)
        for line in run.lines:
            weighted = []
            for update in line["updates"]:
                share = min(1.0, (made + 1) / warmup) if warmup else 1.0
                where = f"iteration {line['iteration']}, update {update['update']}"
                rows.number(where, share * full, update["lr"], full)
                if update["grad_norm"] is not None:
                    made += 1
                    weighted.append((update["lr"], update["num_terms"]))
            if weighted:
                _check_mean(rows, run, line, "lr", weighted, scale=full)


def _audit_mean_rates(run: Run, audit: Audit) -> None:
    """Of a run without audit.jsonl, metrics.jsonl has the mean learning rate of an iteration."""
    text = "the mean learning rate of an iteration, with its warm-up"
    with audit.compare(TOPIC, text, "metrics.jsonl, config.yaml", 1e-6) as rows:
        if run.all_lines:
            raise Inapplicable
        warmup = run.get("warmup_steps", 0)
        total = 0
        for iteration, made in updates_made(run).items():
            shares = [min(1.0, (total + i + 1) / warmup) if warmup else 1.0 for i in range(made)]
            total += made
            if made:
                full = run.get("learning_rate", 1e-5)
                found = run.by_iteration[iteration]["lr"]
                rows.number(f"iteration {iteration}", fmean(shares) * full, found, full)


def _check_mean(rows, run: Run, line: dict, name: str, weighted, *, scale: float = 1.0) -> None:
    """Compare a metric with the mean over the updates of an iteration, weighted by their terms."""
    total = sum(terms for _, terms in weighted)
    mean = sum(value * terms for value, terms in weighted) / total
    found = run.by_iteration[line["iteration"]][name]
    where = f"{name} of iteration {line['iteration']}"
    rows.number(where, mean, found, scale)


def strategy(run: Run) -> str:
    defaults = {"dpo": "fixed", "sft": "none", "draft": "moving", "distill": "none"}
    if run.objective not in ("grpo", "nft", *defaults):
        raise CannotCheck(f"objective {run.objective} is the user's own")
    if run.get("kl_weight", 1e-5) == 0:
        return "none"
    return run.get("kl_strategy", defaults.get(run.objective, "dual_moving"))


def _audit_coefficient(run: Run, audit: Audit) -> None:
    text = "the KL coefficient follows from the KL of the updates before it"
    with audit.compare(TOPIC, text, "audit.jsonl, checkpoints/, config.yaml", 1e-6) as rows:
        first_update(run)
        if "kl_weight" not in run.settings:
            raise Inapplicable
        if strategy(run) == "none":
            for line in run.lines:
                for update in line["updates"]:
                    rows.number(f"update {update['update']}", 0.0, update["kl_coef"])
            return
        warmup = float(run.get("kl_warmup_updates", 100))
        if run.get("reference_conventions") and run.objective == "grpo":
            pairs = run.get("grpo_sampling_steps") * run.get("timestep_fraction", 1.0)
            pairs *= run.get("batch_size", 2) * run.get("gradient_accumulation_steps", 1)
            warmup /= pairs / run.updates_per_iteration
        coefficient = formulas.Coefficient(run.settings, warmup)
        scale = run.get("kl_weight")
        for line in run.lines:
            weighted = []
            for update in line["updates"]:
                where = f"iteration {line['iteration']}, update {update['update']}"
                rows.number(where, coefficient.value, update["kl_coef"], scale)
                if update["grad_norm"] is not None:
                    coefficient.observe(update["kl"])
                    weighted.append((update["kl_coef"], update["num_terms"]))
            if weighted:
                _check_mean(rows, run, line, "kl/coef", weighted, scale=scale)
            if folder := run.checkpoints.get(line["iteration"]):
                found = read_json(folder / "state.json")["kl_coefficient"]["value"]
                where = f"after the update of checkpoint {line['iteration']}"
                rows.number(where, coefficient.value, found, scale)


def _audit_anchor(run: Run, audit: Audit) -> None:
    text = "the anchor's age: updates since its last refresh, which is between iterations"
    with audit.compare(TOPIC, text, "metrics.jsonl, config.yaml") as rows:
        name = strategy(run)
        age = 0
        for iteration, made in updates_made(run).items():
            if name not in ("none", "stepwise"):
                age += made
            if name.endswith("moving") and age >= run.get("update_ref_model_step", 10):
                age = 0
            rows.equal(f"iteration {iteration}", age, run.by_iteration[iteration]["anchor/age"])


def updates_made(run: Run) -> dict[int, int]:
    """Return the updates of each iteration. Raises CannotCheck for a run whose metrics do not begin
    with its first iteration.
    """
    made = {}
    before = 0
    for iteration, line in run.by_iteration.items():
        if iteration == 0:
            continue
        made[iteration] = line["update"] - before
        before = line["update"]
    if not made:
        raise CannotCheck("the run has not finished an iteration")
    if 1 not in made:
        raise CannotCheck("metrics.jsonl does not begin with the first iteration")
    return made


def _audit_weights(run: Run, audit: Audit) -> None:
    text = "the equalizer's weight of each step is median(N) / N, N = |d mean / d v| / std"
    with audit.compare(TOPIC, text, "audit.jsonl, config.yaml", 1e-5) as rows:
        if run.objective != "grpo":
            raise Inapplicable
        levels = levels_of(run)
        sampler = run.get("sde_type", "sage_grpo")
        for line in run.lines:
            steps = steps_with_noise(run, line["iteration"])
            scales = [0.0] * (len(levels) - 1)
            for step in steps:
                std, slope = formulas.step_of(
                    sampler, levels[step], levels[step + 1], eta_of(run), levels[1]
                )
                if std <= 1e-9:
                    raise CannotCheck("the last step of cps has a convention of the reference")
                scales[step] = formulas.gradient_scale(
                    sampler, std, slope, gaussian=bool(run.get("reference_conventions"))
                )
            expected = formulas.equalizer(scales)
            if not run.get("use_grad_balancing", True):
                expected = [float(weight > 0) for weight in expected]
            rows.numbers(f"iteration {line['iteration']}", expected, line["schedule"]["weights"])


def _audit_terms(run: Run, audit: Audit) -> None:
    """Terms of the loss, which ``--record all`` records."""
    with audit.compare(
        TOPIC,
        "the KL of an update is the mean of its terms, with the strategy's weights",
        "audit.jsonl",
        1e-5,
    ) as rows:
        for line, update, terms in terms_of(run):
            where = f"iteration {line['iteration']}, update {update['update']}"
            mean = fmean(term["kl"] for term in terms)
            scale = max(1e-12, max(abs(term["kl"]) for term in terms))
            rows.number(where, mean, update["kl"], scale)
            if run.objective not in ("grpo", "nft"):
                continue
            position, velocity = kl_weights(run)
            for term in terms:
                expected = position * term["kl/position"] + velocity * term["kl/velocity"]
                rows.number(f"{where}, rollout {term['rollout']}", expected, term["kl"], scale)
    text = "each term of the loss: its policy part and the coefficient times its KL"
    with audit.compare(TOPIC, text, "audit.jsonl", 1e-5) as rows:
        for line, update, terms in terms_of(run):
            for term in terms:
                where = f"iteration {line['iteration']}, update {update['update']}, rollout {term['rollout']}"
                if "loss/policy" not in term or "reward_gradient/reward" in term:
                    raise CannotCheck(f"objective {run.objective} has other parts")
                expected = term["loss/policy"] + update["kl_coef"] * term["kl"]
                rows.number(where, expected, term["loss"])
    if run.objective == "grpo":
        _audit_policy_terms(run, audit)
    text = "the metrics of an iteration are the means of the terms of its updates"
    with audit.compare(TOPIC, text, "audit.jsonl, metrics.jsonl", 1e-5) as rows:
        sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line, update, terms in terms_of(run):
            if update["grad_norm"] is None:
                continue
            for term in terms:
                for name, value in term.items():
                    if "/" in name and value is not None:
                        sums[line["iteration"]][name].append(value)
        for iteration, values in sums.items():
            for name, each in values.items():
                found = run.by_iteration[iteration].get(name)
                if found is not None:
                    scale = max(1e-12, max(map(abs, each)))
                    rows.number(f"{name} of iteration {iteration}", fmean(each), found, scale)
    text = "the gradient norm of an iteration is the mean of its updates, weighted by their terms"
    with audit.compare(TOPIC, text, "audit.jsonl, metrics.jsonl", 1e-6) as rows:
        for line in run.lines:
            weighted = [(u["grad_norm"], u["num_terms"]) for u in applied(line)]
            if weighted:
                _check_mean(rows, run, line, "grad/norm", weighted)


def terms_of(run: Run):
    """Yield each update with its terms: a dict for each rollout at each trained step or level."""
    found = False
    for line in run.lines:
        for update in line["updates"]:
            terms = []
            for each in update.get("passes", []):
                for place, rollout in enumerate(each["rollout"]):
                    term = {name: values[place] for name, values in each["values"].items()}
                    term |= {
                        "rollout": rollout,
                        "trained": each["trained"][place],
                        "loss": each["loss"][place],
                        "kl": each["kl"][place],
                    }
                    terms.append(term)
            if terms:
                found = True
                yield line, update, terms
    if not found:
        raise CannotCheck("--record all records the terms of the loss")


def kl_weights(run: Run) -> tuple[float, float]:
    """Return the weights of the KL to the anchor and to the rollout policy.

    Source: arXiv:2603.21872, Section 3.2.2.
    """
    name = strategy(run)
    if name.startswith("dual"):
        return run.get("dual_kl_moving_weight", 1.0), run.get("dual_kl_step_weight", 0.1)
    return float(name in ("fixed", "moving")), float(name == "stepwise")


def _audit_policy_terms(run: Run, audit: Audit) -> None:
    text = "each policy term: the rollout's advantage, its ratio, the clip, and the step's weight"
    with audit.compare(TOPIC, text, "audit.jsonl", 1e-5) as rows:
        clip = run.get("clip_range", 1e-4)
        for line, update, terms in terms_of(run):
            weights = line["schedule"]["weights"]
            advantage = {e["number"]: e["advantage"] for e in entries_of(line)}
            for term in terms:
                expected = formulas.clipped_loss(
                    advantage[term["rollout"]],
                    term["policy/ratio_mean"],
                    weights[term["trained"]],
                    clip,
                )
                where = f"iteration {line['iteration']}, update {update['update']}, rollout {term['rollout']}"
                rows.number(f"{where}, step {term['trained']}", expected, term["loss/policy"])
    text = "ratios are 1 in the first update of an iteration"
    with audit.compare(TOPIC, text, "metrics.jsonl") as rows:
        limit = 1e-6 if run.get("dtype", "bf16") == "fp32" else run.get("clip_range", 1e-4)
        for iteration, line in run.by_iteration.items():
            if line.get("policy/ratio_first_deviation") is not None:
                rows.small(f"iteration {iteration}", line["policy/ratio_first_deviation"], limit)


def _audit_forwards(run: Run, audit: Audit) -> None:
    files = "audit.jsonl, metrics.jsonl, config.yaml"
    text = "forward passes with a gradient: one for each term and branch of guidance"
    with audit.compare(TOPIC, text, files) as rows:
        if run.replicas > 1:
            raise CannotCheck("audit.jsonl counts the passes of the first replica only")
        for line in run.lines:
            if run.objective == "distill" or run.get("reward_gradient_weight", 0.0) > 0:
                raise CannotCheck(f"objective {run.objective} makes other passes, too")
            if run.objective == "draft":
                raise CannotCheck("reward gradients make other passes, too")
            count = sum(len(update["rollouts"]) for update in line["updates"])
            count *= trained_per_rollout(run, line) * branches(run)
            if run.get("guidance_interval"):
                raise CannotCheck("guidance_interval gives steps other numbers of branches")
            found = line["evaluations"].get("training", 0)
            rows.equal(f"iteration {line['iteration']}", count, found)
    text = "forward passes without a gradient: sampling, and the anchor where it differs"
    with audit.compare(TOPIC, text, files) as rows:
        first_update(run)
        if run.objective != "grpo" or run.replicas > 1:
            raise CannotCheck("the audit counts them for objective grpo of one replica only")
        if run.get("guidance_interval"):
            raise CannotCheck("guidance_interval gives steps other numbers of branches")
        age = 0
        for line in run.lines:
            steps = run.get("grpo_sampling_steps", 20)
            expected = run.rollouts * steps * branches(run)
            trained = trained_per_rollout(run, line)
            scale = run.get("anchor_cfg_scale")
            is_other = bool(run.get("anchor_path")) or scale not in (None, run.get("cfg_scale"))
            if strategy(run) not in ("none", "stepwise") and (age or is_other):
                measured = max(1, round(trained * run.get("anchor_fraction", 1.0)))
                guided = 2 if (run.get("cfg_scale") if scale is None else scale) > 1 else 1
                expected += run.rollouts * measured * guided
            found = line["evaluations"].get("sampling", 0)
            rows.equal(f"iteration {line['iteration']}", expected, found)
            age = run.by_iteration[line["iteration"]]["anchor/age"]
    text = "cost/forwards is what passed through the transformer, a gradient counted as 3 or 4"
    with audit.compare(TOPIC, text, "audit.jsonl, metrics.jsonl") as rows:
        if run.replicas > 1 and run.get("enable_fsdp"):
            raise CannotCheck("sharded replicas with fewer rollouts also make empty passes")
        factors = set()
        for line in run.lines:
            passed = line["evaluations"]
            own = run.rollouts / run.replicas
            cost = run.by_iteration[line["iteration"]]["cost/forwards"] * own
            if passed.get("training"):
                factors.add(round((cost - passed.get("sampling", 0)) / passed["training"], 6))
            else:
                where = f"iteration {line['iteration']}, without a gradient"
                rows.number(where, passed.get("sampling", 0), cost)
        if factors:
            rows.equal("factors of all iterations", 1, len(factors))
        for factor in factors:
            is_plain = any(math.isclose(factor, each) for each in (3, 4)) or 3 < factor < 4
            rows.equal(f"factor {factor:g} of a pass with a gradient", True, is_plain)


def branches(run: Run) -> int:
    return 2 if run.get("cfg_scale", 1.0) > 1 else 1
