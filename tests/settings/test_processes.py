"""The environment variables of torchrun, and signals."""

import os
import signal

import pytest

from hyvideo.settings import processes


@pytest.mark.parametrize(
    "release, used",
    [
        ("6.6.87.2-microsoft-standard-WSL2", None),
        ("6.8.0-45-generic", "expandable_segments:True"),
    ],
)
def test_expandable_segments_are_not_used_on_wsl2(monkeypatch, release, used):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(processes.platform, "release", lambda: release)
    processes.use_expandable_segments()
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
