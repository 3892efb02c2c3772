"""The plan of an iteration as text, which a run prints at its start."""

from hyvideo.files.text import Row, counted, lines_of
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import MAX_NOISE, Plan
from hyvideo.settings.objectives.base import ObjectiveSettings
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.version_notes import run_notes


def describe(config: Config, plan: Plan) -> str:
    """Return the notes on the model version and the plan of an iteration, a line for each
    quantity.
    """
    return "\n".join(lines_of(run_notes(config) + plan_rows(config, plan)))


def plan_rows(config: Config, plan: Plan) -> list[Row]:
    """Return the rows of the plan: how many rollouts, in which batches, with how much noise,
    trained how.
    """
    objective = config.objective
    if objective.videos_from:
        return _rows_of_videos(config, plan)
    rollout = config.rollout
    sampling = config.sampling
    variances = [step.std**2 for step in sampling.stochastic_transitions()]
    rows = [
        ("replicas", f"{plan.replicas} (sp_size {config.distributed.sp_size})"),
        (
            "rollouts per iteration",
            f"{plan.rollouts} = {plan.groups} prompts x {rollout.num_generations}",
        ),
    ]
    batches = rollout.gradient_accumulation_steps
    if batches > 1:
        difference = (
            "max_steps, save_interval and validation_interval count iterations; in the public "
            f"reference they count batches: divide its values by {batches}"
        )
        rows.append(("batches per iteration", f"{batches} (gradient_accumulation_steps)"))
        rows.append(("", difference))
    rows.append(("updates per iteration", _updates(plan, config.rows_per_pass)))
    steps = f"{sampling.steps}, {plan.stochastic_steps} of them stochastic"
    if objective.trains != "levels":
        steps += f", {plan.num_trained_steps} trained"
    if rollout.sigmas:
        steps += f"; sigmas {rollout.sigmas}"
    rows.append(("steps per rollout", steps))
    rows.append(("exploration", _exploration(config, variances)))
    noise = _largest_noise(sampling)
    if noise > MAX_NOISE:
        warning = (
            f"eta {sampling.eta:.4g} adds noise of up to {noise:.3g} times the noise level after a "
            f"step; above {MAX_NOISE:g} videos become noise: lower eta"
        )
        rows.append(("WARNING", warning))
    if objective.trains != "path":  # with a path, the anchor is the teacher
        rows.append(("trust region", _trust_region(objective, rollout.sde_type, plan, variances)))
    rows += _objective(objective, plan, config.anchor_cfg_scale)
    return rows


def _rows_of_videos(config: Config, plan: Plan) -> list[Row]:
    """Return the rows of the plan of a run that trains on videos of files."""
    objective = config.objective
    levels = counted(objective.nft_levels, "noise level")
    rows = [("replicas", f"{plan.replicas} (sp_size {config.distributed.sp_size})")]
    of_iteration = f"{plan.groups}, one update, {levels} per {objective.example}"
    rows.append((f"{objective.example}s per iteration", of_iteration))
    rows.append(("objective", f"{objective.name}, {objective.method}"))
    if objective.needs_anchor:
        coefficient = f"{objective.kl_schedule} coefficient, at most {objective.kl_weight:g}"
        rows.append(("KL to the base model", coefficient))
    return rows


def _updates(plan: Plan, size: int) -> str:
    """Return the updates of an iteration, and whether their last forward pass is smaller than the
    others, which have ``size`` rollouts.
    """
    each = "each on" if plan.updates > 1 else "on"
    text = f"{plan.updates}, {each} {counted(plan.groups // plan.updates, 'group')}"
    per_update = plan.rollouts // (plan.replicas * plan.updates)  # rollouts of a replica
    rest = per_update % size
    if rest == 0:
        return text
    last = f"the last pass has {rest}" if per_update > size else f"one pass of {rest}"
    return (
        f"{text}; mini_batch_size_per_update {size} does not divide a replica's {per_update} "
        f"rollouts: {last}"
    )


def _exploration(config: Config, variances: list[float]) -> str:
    """Return the sampler and the noise variance that it adds, also inside of an SDE window."""
    if not variances:
        return "initial noise only; rollouts are sampled with the ODE"
    sde_window = config.objective.window
    text = f"{config.rollout.sde_type} with eta {config.eta:.4g}"
    if config.eta != config.rollout.eta:
        text += f", which has the noise of {config.rollout.eta}"
    text += f"; noise variance {sum(variances):.4g} over all steps"
    window = parse_window(sde_window, len(variances))
    if window is None:
        return text
    text += " without a window"
    inside = window.sums(variances)
    low = f"{min(inside):.4g}"
    high = f"{max(inside):.4g}"
    if low == high:
        return f"{text}, {low} in sde_window {sde_window}"
    mean = sum(inside) / len(inside)
    return f"{text}, {low} to {high} in sde_window {sde_window}, mean {mean:.4g} over its positions"


def _largest_noise(sampling: Sampling) -> float:
    """Return the largest std of a step, relative to the noise level after the step; 0 with a single
    step.
    """
    # The last step ends at noise level 0, where the quotient has no meaning.
    ends = sampling.levels[1:-1]
    return max((step.std / end for step, end in zip(sampling.transitions(), ends)), default=0.0)


def _trust_region(
    settings: ObjectiveSettings, sde_type: str, plan: Plan, variances: list[float]
) -> str:
    """Return the KL strategy, and what the velocity KL measures with a sampler whose density is not
    normalized.
    """
    text = f"{settings.strategy}, {settings.kl_schedule} coefficient"
    is_scaled = (
        settings.has_ratio
        and settings.measures_velocity
        and settings.kl_velocity == "log_ratio"
        and not sampler_of(sde_type).is_normalised
    )
    if not plan.clip_can_bind or not is_scaled:
        return text
    return (
        f"{text}; the log_ratio of {sde_type} is 2 std^2 times the KL: {2 * variances[0]:.2g} "
        f"times at the first and {2 * variances[-1]:.2g} times at the last stochastic step; "
        "kl_velocity gaussian measures the KL"
    )


def _objective(objective: ObjectiveSettings, plan: Plan, teacher_scale: float) -> list[Row]:
    """Return the rows on the objective: its noise levels, or its ratios and their clipping."""
    if objective.trains == "levels":
        text = f"{objective.name}, {objective.nft_levels} noise levels per rollout"
        if plan.num_reward_steps:
            text += ", gradient of the reward at the last step"
        return [("objective", text)]
    if objective.trains == "path":
        teacher = f"{plan.num_anchor_steps} steps with guidance scale {teacher_scale:g}"
        if objective.anchor_path:
            teacher += f", {objective.anchor_path}"
        return [("objective", objective.name), ("teacher", teacher)]
    if not objective.has_ratio:
        return [("objective", objective.name)]
    if plan.clip_can_bind:
        ratios = "1 in the first update of an iteration"
        clipping = "active after the first update"
    else:
        ratios = "always 1"
        clipping = "never active"
    return [("ratios", ratios), ("clip range", f"{objective.clip_range:g}, {clipping}")]
