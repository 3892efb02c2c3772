"""Shared fixtures: small runs with reduced settings of configs/smoke.yaml."""

import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from hyvideo.settings.command_line import load_config
from hyvideo.settings.config import Config
from tests import forked, fuzzing
from tests.registered import registered
from tests.shallow import SHALLOW

ROOT = Path(__file__).parent.parent

# A background job of bash ignores Ctrl-C, and so would the programs that tests start in it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The longest tests start first, in this order, so that no worker finishes long after the others.
LONGEST = (
    "audit/test_audited_runs.py",
    "training/test_expert_training.py",
    "training/test_objective_contract.py",
    "training/test_faults.py",
    "promises/test_same_results.py",
    "promises/test_restart.py",
    "test_trainer.py",
    "distributed/test_same_run.py",
    "scripts/test_gpu_check.py",
    "distributed/test_rank_faults.py",
    "training/test_wan_training.py",
    "models/test_compile.py",
    "test_generate.py",
    "generation/test_offloading.py",
    "training/test_nft_objective.py",
    "training/test_policy_update.py",
    "distributed/test_resharding.py",
    "training/test_run_state.py",
    "studies/recipes/test_recipes.py",
    "training/test_on_policy_check.py",
    "distributed/test_sequence_parallel.py",
    "validation/test_hacking_in_runs.py",
    "examples/miniature_from_scratch/test_build.py",
    "fake_cuda/test_fake_cuda.py",
    "fake_cuda/test_phases.py",
    "test_post_train.py",
    "rewards/videoalign/test_scorer.py",
    "ratings/test_reward_training.py",
    "generation/test_shared_generation.py",
    "schedulers/samplers/test_tables.py",
    "scripts/test_launchers.py",
    "distributed/test_watchdog.py",
    "distributed/test_same_start.py",
    "models/test_fp8.py",
    "models/test_loading.py",
    "models/wan/test_vae.py",
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run all tests")
    parser.addoption("--system", action="store_true", help="also run the tests marked system")
    parser.addoption(
        "--regenerate", action="store_true", help="write generated files instead of comparing them"
    )


def pytest_configure(config):
    # under nohup, the runs of the tests would ignore it, as they should
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    forked.become_server_owner()
    fuzzing.run_all_examples = config.getoption("--slow")
    if config.getoption("numprocesses", None):  # the workers run the tests
        config.option.tx = [f"popen//python={forked.python()}"] * len(config.option.tx)
    else:
        forked.cache_models()


def pytest_collection_modifyitems(config, items):
    """Run long files first, and skip tests marked slow or system, or that need a GPU."""
    order = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    on_gpu = [item for item in items if "cuda" in item.keywords]
    if on_gpu and not _can_check_gpu():
        for item in on_gpu:
            item.add_marker(
                pytest.mark.skip(reason="needs a GPU; CHECK_DEVICE=cpu runs it on the CPU")
            )
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; --slow runs it"))
        elif "system" in item.keywords and not config.getoption("--system"):
            item.add_marker(pytest.mark.skip(reason="system; --system runs it"))


def _can_check_gpu() -> bool:
    import torch

    return os.environ.get("CHECK_DEVICE") == "cpu" or torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _frozen_modules():
    import torch  # noqa: F401 - the largest of them

    gc.collect()
    gc.freeze()  # imported modules need no garbage collection


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Use one thread, also after a test that ran a program, which sets its number of threads, and in
    fixtures that several tests share.
    """
    import torch

    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _ended_runs():
    """End the threads of a test's runs: a stack trace shows at most 100."""
    from hyvideo.files.run_folder import Lease

    leases = []
    enter = Lease.__enter__

    def enter_and_note(lease):
        leases.append(enter(lease))
        return lease

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "__enter__", enter_and_note)
        yield
    for lease in leases:
        lease.__exit__()
    if threading.active_count() > 40:
        gc.collect()  # ends the threads that score the rewards of deleted runs


HOLDER = """
import sys, time
from pathlib import Path
from hyvideo.files import run_folder
run_folder.LEASE_S = 1.2
with run_folder.Lease(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def in_use(monkeypatch):
    """A context in which another process holds the lease of a folder; it yields the process's
    number. Leases end after 1.2 seconds without a sign of life.
    """
    monkeypatch.setattr("hyvideo.files.run_folder.LEASE_S", 1.2)

    @contextmanager
    def used(folder):
        from hyvideo.files.run_folder import Lease

        command = [forked.python(), "-c", HOLDER, folder]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "ready\n"
            try:
                yield Lease(folder)._lock.owner.pid
            finally:
                holder.kill()

    return used


@pytest.fixture
def forked_programs(monkeypatch):
    """Start programs through the server of tests/forked.py, so that they need not import torch
    again.
    """
    monkeypatch.setattr(sys, "executable", forked.python())


@pytest.fixture
def mesh():
    from hyvideo.distributed.mesh import Mesh

    return Mesh(rank=0, world_size=1, sp_size=1)


@pytest.fixture
def tiny_config(tmp_path, monkeypatch) -> Config:
    """The settings of `small_config`, for one test."""
    monkeypatch.chdir(ROOT)
    return small_config(tmp_path / "run")


def small_config(output_dir: Path) -> Config:
    """One update per iteration, one branch, no validation; 8 rollouts of 5 frames of 16 x 16, by a
    transformer of two blocks.
    """
    return _small_config().with_settings(output_dir=str(output_dir))


@functools.cache
def _small_config() -> Config:
    return load_config(
        str(ROOT / "configs/smoke.yaml"),
        pretrained_model_root=SHALLOW,
        num_threads=1,
        valid_video_csv="",
        cfg_scale=1.0,
        num_updates_per_rollout=1,
        mini_batch_size_per_update=8,
        report_to=["none"],
        log_video_interval=0,
        report=False,
    )


@pytest.fixture(autouse=True)
def only_known_families():
    """Forget the families outside the repository that a test has registered."""
    with registered(""):
        yield


@pytest.fixture
def limited_file_size():
    """A context that limits the size of written files, as on a full disk."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def check_generated(request):
    """Return a function that compares a file with its generated text; with --regenerate, it writes
    the file first.
    """

    def check(path: Path, text: str):
        if request.config.getoption("--regenerate"):
            path.write_text(text, encoding="utf-8")
        options = [f"--{mark}" for mark in ("slow", "system") if mark in request.keywords]
        options.append("--regenerate")
        command = f"python -m pytest {request.path.relative_to(ROOT)} {' '.join(options)}"
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is outdated; regenerate it: {command}"
        )

    return check


@pytest.fixture
def exit_code(monkeypatch):
    """Run the ``main`` of a program with command-line arguments and return its exit code."""

    def run(main, *words):
        monkeypatch.setattr(
            "sys.argv", [f"{main.__module__.rpartition('.')[2]}.py", *map(str, words)]
        )
        try:
            return main() or 0
        except SystemExit as ended:
            return ended.code

    return run
