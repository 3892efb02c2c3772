"""The environment variables of torchrun, and signals."""

import os
import signal

import pytest

from hyvideo.settings import processes


@pytest.mark.parametrize(
    "release, torch, used",
    [
        ("6.6.87.2-microsoft-standard-WSL2", "2.12.1", None),
        ("6.6.87.2-microsoft-standard-WSL2", "2.13.0+cpu", "pinned_max_round_threshold_mb:1"),
        ("6.8.0-45-generic", "2.9.0", "expandable_segments:True"),
        (
            "6.8.0-45-generic",
            "2.13.0+cu130",
            "expandable_segments:True,pinned_max_round_threshold_mb:1",
        ),
    ],
)
def test_the_allocator_gets_only_what_the_driver_and_torch_know(monkeypatch, release, torch, used):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(processes.platform, "release", lambda: release)
    monkeypatch.setattr(processes, "version", lambda package: torch)
    processes.configure_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == used


@pytest.mark.parametrize(
    "local, cores, given, workers",
    [
        ("8", 96, None, "12"),
        ("8", 4, None, "1"),
        ("8", 96, "3", "3"),
        ("1", 96, None, None),
    ],
)
def test_the_compilers_of_a_machine_share_its_cores(monkeypatch, local, cores, given, workers):
    for name, value in {"LOCAL_WORLD_SIZE": local, "TORCHINDUCTOR_COMPILE_THREADS": given}.items():
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(processes, "num_cores", lambda: cores)
    processes.share_compile_workers()
    assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == workers


def test_a_closed_terminal_stops_a_run_unless_nohup_ignores_it():
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in processes.stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert processes.stop_signals() == {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)


SLURM_TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    "environment, launcher",
    [
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "2"}, "srun"),
        (SLURM_TASK, "srun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "mpirun"),
        # srun in a batch script
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "2", "ENVIRONMENT": "BATCH"}, "srun"),
        ({}, None),
        (SLURM_TASK | {"WORLD_SIZE": "2"}, None),  # torchrun, or the user's own variables
        ({"SLURM_NTASKS": "8"}, None),  # the shell of salloc
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"},
            None,
        ),  # a batch script
        (SLURM_TASK | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --ntasks=1 in a larger job
    ],
)
def test_several_tasks_of_another_launcher_are_refused(monkeypatch, environment, launcher):
    for name in ("WORLD_SIZE", "ENVIRONMENT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if launcher is None:
        assert processes.world_size() == int(environment.get("WORLD_SIZE", "1"))
        return
    with pytest.raises(ValueError, match=f"{launcher}.*torchrun"):
        processes.world_size()
