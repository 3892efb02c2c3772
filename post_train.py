"""Train HunyuanVideo-1.5, Wan or the miniature with a reward, ratings or videos:
``post_train.py --config FILE.yaml [flags]``.

Use torchrun for several processes. ``--print_config`` prints the settings and the size of the run,
then exits. Slow imports such as torch come after the settings have been checked.
"""

import re
import shlex
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hyvideo.checks.layout import planned_world_size
from hyvideo.checks.machine_rules import check_gpu
from hyvideo.checks.rules import check, with_local_weights
from hyvideo.checks.without_effect import settings_without_effect
from hyvideo.files.text import counted, labelled, lines_of, shorten
from hyvideo.planning.hardware import assumed_hardware, hardware_of, hardware_of_device
from hyvideo.settings import processes
from hyvideo.settings.command_line import CommandLine, parse
from hyvideo.settings.config import Config
from hyvideo.settings.plan_text import describe
from hyvideo.settings.reference_flags import with_flags
from hyvideo.settings.run_inputs import RunInputs


def print_after_rank_0(*error) -> None:
    """Print an uncaught exception, on rank 0 first."""
    processes.wait_for_rank_0()
    sys.__excepthook__(*error)


def main() -> int:
    processes.prepare()
    command = parse()
    sys.excepthook = print_after_rank_0
    with ExitStack() as at_end:
        try:
            return run(command, at_end)
        except SystemExit as error:  # of an objective or a sampler; code 0 would mean success
            raise RuntimeError(f"the run has called sys.exit({error.code!r})") from error


def run(command: CommandLine, at_end: ExitStack) -> int:
    """Train and return the exit code.

    0, 1 if the on-policy check fails, 2 for a user error, 3 for reward hacking, 75 after a signal.
    """
    config = command.config
    try:
        if command.print_config:
            show(command)
            return 0
        inputs = check(config, processes.world_size(), file=command.file)
        check_gpu(config.model.device)
        if processes.rank() == 0:
            print_start(command, inputs)
        trainer = build(with_local_weights(config), at_end)
        if trainer is None:
            return 0
    except ValueError as error:  # user errors; other and later errors keep their traceback
        processes.wait_for_rank_0()
        hint = ""
        if "--config" not in " ".join(sys.argv):
            hint = (
                "\nwithout --config, a run needs several GPUs; try --config configs/miniature.yaml"
            )
        print(
            f"post_train.py: {shorten(with_flags(str(error), command.flags))}{hint}",
            file=sys.stderr,
        )
        return 2

    from hyvideo.distributed import mesh as ranks
    from hyvideo.files.run_folder import NotOwner
    from hyvideo.planning.pilot import print_pilot
    from hyvideo.report.run_summary import print_summary
    from hyvideo.training.on_policy_check import OffPolicyError
    from hyvideo.training.preemption import Stopped
    from hyvideo.validation.reward_hacking import RewardHacking

    if trainer.mesh.is_main:
        print_built(inputs, trainer)
    code = 0
    try:
        trainer.train()
    # raised by all ranks together
    except (RewardHacking, Stopped, NotOwner, OffPolicyError) as error:
        codes = {RewardHacking: 3, Stopped: processes.STOPPED_CODE, NotOwner: 2, OffPolicyError: 1}
        code = codes[type(error)]
        if trainer.mesh.is_main:
            print(f"post_train.py: {error}", file=sys.stderr)
    if trainer.mesh.is_main and code in (0, 3) and not command.pilot:
        print_summary(trainer.output_dir, trainer.iteration, trainer.validation)
    if trainer.mesh.is_main and code == 0 and command.pilot:
        print_pilot(trainer.run.loaded.planned_run, trainer.device)
    ranks.stop()
    return code


def show(command: CommandLine) -> None:
    """Print the settings, the plan, and what this machine lacks.

    Raises ValueError only for invalid settings.
    """
    import yaml  # not at the top: without packages, hyvideo says which command finds them

    config = command.config
    started = processes.world_size()
    world_size = command.world_size or started
    if command.world_size is None and started == 1:
        world_size = planned_world_size(config, command.file)
    hardware = planned_hardware(command)
    inputs = check(config, world_size, file=command.file, on_this_machine=False)
    if processes.rank() != 0:
        return
    print(yaml.safe_dump(config.flat(), sort_keys=False, allow_unicode=True))
    if command.of_version:
        print(
            f"defaults of version    {', '.join(command.of_version)} "
            f"({config.model.transformer_version})"
        )
    if world_size > started:
        each = world_size if world_size % 8 else 8  # processes per node
        rows = [
            (
                "planned for",
                f"torchrun --nnodes={world_size // each} --nproc_per_node={each} post_train.py "
                f"{shlex.join(command.words)}",
            ),
            ("", "the batches need several processes; --world_size N plans for N processes"),
        ]
        print("\n".join(lines_of(rows)))
    if config.model.device != "cpu" and not command.gpu:
        note = f'{hardware.name}; --gpu NAME plans for another one, such as "RTX 4090"'
        print(*lines_of([("planned GPU", note)]))
    from hyvideo.planning.memory import memory
    from hyvideo.planning.plan import memory_table, plan_lines, planned_run, steps_table
    from hyvideo.planning.recommendation import recommendation

    print_plan(inputs, plan_lines(inputs, config.model.device, hardware))
    if config.objective.has_ratio:
        print("\n".join(["", *steps_table(config.sampling, config.objective.window), ""]))
    if command.gpu or command.gpu_memory:
        planned = planned_run(inputs, config.model.device, hardware)
        print("\n".join(["", *memory_table(memory(planned)), ""]))
        print("\n".join(recommendation(planned, command.words)))

    sys.stdout.flush()
    from hyvideo.loading.requirements import missing_requirements

    label = "missing on this host"
    for message in missing_requirements(inputs):  # the last ones take seconds
        print(*lines_of([(label, message)]), flush=True)
        label = ""


def planned_hardware(command: CommandLine):
    """Return the GPU to plan for. Raises ValueError for an unknown one."""
    hardware = hardware_of(command.gpu) if command.gpu else assumed_hardware()
    if command.gpu_memory:
        hardware = replace(hardware, gpu_memory=command.gpu_memory)
    return hardware


def print_plan(inputs: RunInputs, cost: list[str], given: Collection[str] | None = None) -> None:
    """Print the plan of the run, the lines on its ``cost``, and the settings, among ``given``, that
    have no effect.
    """
    ignored = settings_without_effect(inputs)
    if given is not None:
        ignored = [
            line
            for line in ignored
            if set(re.findall(r"\w+", line.partition(": ")[0])) & set(given)
        ]
    print(
        "\n".join(
            [
                describe(inputs.config, inputs.plan),
                *cost,
                *lines_of(labelled("settings to check", ignored)),
            ]
        )
    )


def print_start(command: CommandLine, inputs: RunInputs) -> None:
    """Print what starts, with which settings, and the plan, before torch is imported.

    Hours and memory on a GPU follow once its model is known.
    """
    from hyvideo.planning.plan import plan_lines
    from hyvideo.records.progress_bar import print_stage

    config = command.config
    on_gpu = config.model.device != "cpu" and processes.may_have_gpu()
    as_run = inputs.with_config(config.resolve_auto(on_gpu=on_gpu, recompute="auto"))
    model = config.model
    rows = [
        ("command", f"post_train.py {shlex.join(command.words)}"),
        ("model", f"{model.transformer_version} in {model.pretrained_model_root}"),
    ]
    if config.trained_expert:
        rows.append(("trained expert", f"{config.trained_expert} noise"))
    print("\n".join(lines_of(rows)))
    print_plan(as_run, [] if on_gpu else plan_lines(as_run, "cpu"), command.flags)
    sys.stdout.flush()
    print_stage("importing torch and the models")


def print_built(inputs: RunInputs, trainer) -> None:
    """Print the cost of the run on its GPU, the number of trained parameters, the attention kernel
    and the first iteration.
    """
    from hyvideo.loading.gpu_driver import cudnn_problem
    from hyvideo.loading.machine import device_name, gpu_memory
    from hyvideo.planning.plan import plan_lines

    device = trainer.device
    if inputs.config.model.device != "cpu" and processes.may_have_gpu():
        as_run = inputs.with_config(trainer.config)  # without ``auto``
        hardware = hardware_of_device(device_name(device), gpu_memory(device))
        print("\n".join(plan_lines(as_run, device.type, hardware)))
    trained = sum(parameter.numel() for parameter in trainer.run.policy.parameters)
    rows = [("training", f"{trained / 1e6:.2f} million parameters on {device}")]
    if inputs.videos:
        given = counted(len(inputs.videos.train), inputs.config.objective.example)
        if inputs.videos.held_out:
            given += f"; {len(inputs.videos.held_out)} are held out to measure agreement"
        rows.append(("trained on", given))
    kernel, rejected = trainer.run.loaded.attention
    chosen = "chosen by torch" if kernel == "torch" else f"{kernel} kernel"
    rows += labelled(
        "attention", [chosen, *(f"not {name}: {reason}" for name, reason in rejected.items())]
    )
    warning = cudnn_problem() if device.type == "cuda" else None
    if warning:
        rows.append(("warning", warning))
    rows += [("changed settings", sentence) for sentence in trainer.run.state.changed_settings]
    begin = f"resuming from iteration {trainer.iteration}" if trainer.resumed else "new run"
    rows.append(("output", f"{inputs.config.record.output_dir}, {begin}"))
    print("\n".join(lines_of(rows)), flush=True)


def build(config: Config, at_end: ExitStack):
    """Join the other processes and return the trainer; None, after a summary, if the run is
    finished.

    The watchdog runs until ``at_end`` closes.
    """
    import torch

    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.same_start import require_same_start
    from hyvideo.distributed.watchdog import Watchdog
    from hyvideo.loading.gpu_driver import check_allocator
    from hyvideo.loading.model_setup import choose_device, make_deterministic
    from hyvideo.report.run_summary import print_summary
    from hyvideo.trainer import Finished, Trainer

    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    settings = config.distributed
    if settings.deterministic:
        make_deterministic()
    device = choose_device(config.model.device, processes.local_rank())
    check_allocator(device)
    if processes.world_size() > 1:  # before groups whose sizes the settings decide
        ranks.join(device, timeout=settings.timeout)
        everyone = ranks.Mesh(processes.rank(), processes.world_size(), sp_size=1)
        require_same_start(config.flat(), device, everyone)
    mesh = ranks.start(
        settings.sp_size,
        device,
        dp_replicate=settings.dp_replicate,
        timeout=settings.timeout,
    )
    watchdog = at_end.enter_context(Watchdog(mesh, settings.report_after))
    try:
        return Trainer(config, mesh, device, on_stage=watchdog.enter)
    except Finished as finished:
        if mesh.is_main:
            print(f"{finished}; to train on, increase max_steps")
            print_summary(Path(config.record.output_dir), config.optimizer.max_steps, None)
        ranks.stop()
        return None


if __name__ == "__main__":
    processes.exit_on_signals()
    sys.exit(main())
