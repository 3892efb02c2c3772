"""Launch scripts for several nodes: arguments, environment and signals.

This machine acts as every node.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.settings.command_line import load_config, parse
from hyvideo.settings.iteration_plan import num_rollouts
from tests.forked import ROOT, python
from tests.shallow import SHALLOW

TRAIN = ["bash", "scripts/post_train/train_grpo.sh"]

# A fake launcher: logs its arguments and, if WAIT is set, waits for SIGTERM. With -c, it prints 3,
# the number of GPUs.
PYTHON = """#!/usr/bin/env bash
[ "$1" != -c ] || { echo 3; exit; }
{
    printf '[%s]\\n' "$@"
    env | grep '^NCCL_\\|^GLOO_\\|^SECRET'
} > "$LOG.launcher.part"
mv "$LOG.launcher.part" "$LOG.launcher"
echo started >> "$LOG.starts"
[ -n "${WAIT:-}" ] || exit "${CODE:-0}"
sleep 60 &
trap 'kill $!; echo ended > "$LOG.ended"; exit "${CODE:-1}"' TERM
echo > "$LOG.waits"
wait
"""
# Like the real pdsh: expands %% and %h, and the node's login shell runs the command without our
# environment.
PDSH = """#!/usr/bin/env bash
printf '%s\\n' "${@:1:$#-1}" > "$LOG.pdsh"
command="${!#}"
command="${command//%%/$'\\001'}"
command="${command//%h/HOST}"
exec env -i PATH="$PATH" LOG="$LOG" WAIT="${WAIT:-}" CODE="${CODE:-}" sh -c "${command//$'\\001'/%}"
"""
SSH = """#!/usr/bin/env bash
node="${@: -2:1}"
[ "$node" != broken ] || exit 255
echo "hello from $node"
exec env -i PATH="$PATH" LOG="$LOG-$node" WAIT="${WAIT:-}" sh -c "${!#}"
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a script with fake programs first on PATH.

    Processes that still run after the test are terminated.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    started = []

    def start(command, fakes=None, **environment):
        for name, text in (fakes or {}).items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "NCCL_"))
        }
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        clean |= {
            "PATH": path,
            "LOG": str(tmp_path / "log"),
            "SKIP_SETUP": "1",
            "OMP_NUM_THREADS": "1",
        } | environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # As in a terminal: background jobs ignore SIGINT, and a script cannot trap an ignored
        # signal.
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=clean, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # the scripts forward it
        process.communicate(timeout=30)


@pytest.fixture
def start_real(start):
    """Start a script whose ``python`` has already imported torch."""
    environment = {"PYTHON_EXEC": python(), "PYTHONPATH": str(ROOT)}
    program = {"python": f'#!/usr/bin/env bash\nexec {python()} "$@"\n'}
    return lambda command, **variables: start(command, program, **environment | variables)


def finish(process):
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


def launcher_arguments(log):
    lines = Path(f"{log}.launcher").read_text().splitlines()
    return [line[1:-1] for line in lines if line.startswith("[")]


def wait_for(pipe):
    """Wait until the fake launcher writes to the named pipe."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert select.select([reader], [], [], 20)[0], f"nothing came through {pipe}"
    os.close(reader)


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_train_one_run(start_real, tmp_path):
    out = tmp_path / "run with spaces"
    flags = [
        "--config",
        "configs/smoke.yaml",
        "--max_steps",
        "1",
        "--output_dir",
        out,
        "--batch_size",
        "4",
    ]
    flags += [
        "--valid_video_csv",
        "",
        "--num_threads",
        "1",
        "--report_to",
        "none",
        "--cfg_scale",
        "1",
    ]
    flags += ["--pretrained_model_root", SHALLOW]
    places = {
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    nodes = [start_real([*TRAIN, *flags], **places) for _ in range(2)]
    for code, output in map(finish, nodes):
        assert code == 0, output
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 1


def test_a_user_error_is_not_restarted_and_exits_with_2(start_real):
    code, output = finish(
        start_real([*TRAIN, "--config", "configs/smoke.yaml", "--eta", "-1"], NPROC_PER_NODE="1")
    )
    assert code == 2 and output.count("error: eta: ") == 1, output


def test_the_launcher_receives_the_node_settings_and_all_arguments(start, tmp_path):
    places = {
        "NNODES": "4",
        "NPROC_PER_NODE": "8",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "1234",
        "RDZV_ID": "x",
    }
    assert finish(start([*TRAIN, "--prompt", "a  'b' $c"], {"python": PYTHON}, **places)) == (0, "")
    arguments = launcher_arguments(tmp_path / "log")
    words = (
        "--nnodes=4 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=node1:1234 --rdzv-id=x"
    )
    assert arguments[:2] == ["-m", "scripts.launch"] and set(words.split()) <= set(arguments)
    assert arguments[-3:] == ["post_train.py", "--prompt", "a  'b' $c"]


def test_each_gpu_that_torch_counts_gets_a_process(start, tmp_path):
    assert (
        finish(start(TRAIN, {"python": PYTHON, "nvidia-smi": "echo GPU 0: of another user"}))[0]
        == 0
    )
    assert "--nproc_per_node=3" in launcher_arguments(tmp_path / "log")


def test_a_variable_that_is_no_number_is_a_user_error(start, tmp_path):
    given = {"MASTER_ADDR": "node1", "NPROC_PER_NODE": "x"}
    code, output = finish(start(TRAIN, {"python": PYTHON}, **given))
    assert code == 2
    assert "NPROC_PER_NODE must be an integer of at least 1, got 'x'" in output
    assert not (tmp_path / "log.launcher").exists()


@pytest.mark.parametrize(
    "sent, job, launcher_code, code",
    [
        (signal.SIGUSR1, "7", 1, 75),
        (signal.SIGUSR1, "7", 2, 2),
        (signal.SIGTERM, "7", 75, 143),
        (signal.SIGTERM, "", 1, 1),
    ],
)
def test_a_signal_stops_the_launcher_and_the_run_is_not_started_again(
    start, tmp_path, sent, job, launcher_code, code
):
    os.mkfifo(tmp_path / "log.waits")
    given = {"CODE": str(launcher_code), "PID_FILE": str(tmp_path / "pid"), "SLURM_JOB_ID": job}
    node = start(TRAIN, {"python": PYTHON}, WAIT="1", **given)
    wait_for(tmp_path / "log.waits")
    node.send_signal(sent)
    assert finish(node)[0] == code
    assert (tmp_path / "log.ended").exists() and not (tmp_path / "pid").exists()
    assert (tmp_path / "log.starts").read_text() == "started\n"


@pytest.mark.parametrize("code, starts", [(1, 3), (2, 1), (75, 1)])
def test_only_a_run_that_ends_with_1_is_started_again(start, tmp_path, code, starts):
    given = {"CODE": str(code), "MAX_RESTARTS": "2", "NPROC_PER_NODE": "1"}
    assert finish(start(TRAIN, {"python": PYTHON}, **given))[0] == code
    assert (tmp_path / "log.starts").read_text() == "started\n" * starts


def test_several_nodes_are_started_again_together_with_another_rendezvous(start, tmp_path):
    given = {"NODES": "node1,node2", "CODE": "1", "MAX_RESTARTS": "1", "RDZV_ID": "x"}
    fakes = {"pdsh": PDSH, "python": PYTHON}
    code, output = finish(start(["bash", "run_post_train_multinode.sh"], fakes, **given))
    assert code == 1 and "restart 1 of at most 1" in output
    assert (tmp_path / "log.starts").read_text() == "started\n" * 2
    assert "--rdzv-id=x-1" in launcher_arguments(tmp_path / "log")


# `ip route get` and `ip addr show to` on a node of the network 10.0.0.0/24 whose address is 10.0.0.2
IP = """#!/usr/bin/env bash
case "$*" in
    *"route get 10.0.0.2"*) echo "local 10.0.0.2 dev lo src 10.0.0.2 uid 0 \\    cache <local>" ;;
    *"route get"*) echo "${!#} via 10.0.0.254 dev eth1 src 10.0.0.2 uid 0 \\    cache" ;;
    *"addr show to 10.0.0.2"*) echo "3: eth1    inet 10.0.0.2/24 brd 10.0.0.255 scope global eth1" ;;
esac
"""


@pytest.mark.parametrize(
    "resolved, endpoint",
    [("10.0.0.1", "node1:29500"), ("127.0.1.1", "localhost:29500")],
)
def test_nodes_announce_the_address_and_interface_that_reach_the_first(
    start, tmp_path, resolved, endpoint
):
    lines = "".join(f"{address} STREAM node1\\n" for address in resolved.split())
    fakes = {"python": PYTHON, "ip": IP, "getent": f"#!/usr/bin/env bash\nprintf '{lines}'\n"}
    given = {"NNODES": "2", "MASTER_ADDR": "node1", "NPROC_PER_NODE": "1"}
    assert finish(start(TRAIN, fakes, **given)) == (0, "")
    arguments = launcher_arguments(tmp_path / "log")
    assert {"--local-addr=10.0.0.2", f"--rdzv-endpoint={endpoint}"} <= set(arguments)
    assert "GLOO_SOCKET_IFNAME=eth1" in (tmp_path / "log.launcher").read_text()


HARD = ["--prompt", 'it\'s 100% %h "quoted" $HOME\nsecond line', "--empty", "", "--glob", "*"]


def test_every_argument_survives_pdsh(start, tmp_path):
    environment = {
        "NODES": "node1,node2",
        "NCCL_DEBUG": "INFO WARN",
        "SECRET_KEY": "hidden",
        "NPROC_PER_NODE": "2",
    }
    fakes = {"pdsh": PDSH, "python": PYTHON}
    code, output = finish(
        start(["bash", "run_post_train_multinode.sh", *HARD], fakes, **environment)
    )
    assert code == 0, output
    assert (tmp_path / "log.pdsh").read_text().split() == "-S -R ssh -f 2 -w node1,node2".split()
    recorded = (tmp_path / "log.launcher").read_text()
    assert "".join(f"[{argument}]\n" for argument in HARD) in recorded
    assert {"[--nnodes=2]", "[--nproc_per_node=2]", "[--rdzv-endpoint=node1:29500]"} <= set(
        recorded.splitlines()
    )
    assert "NCCL_DEBUG=INFO WARN" in recorded and "SECRET" not in recorded


def without_pdsh(tmp_path):
    """Return a PATH with the needed programs but no pdsh."""
    folder = tmp_path / "tools"
    folder.mkdir()
    names = "bash sh env sed awk paste sort uniq date cat grep mv rm ls sleep touch setsid"
    for name in [*names.split(), "dirname", "readlink"]:
        (folder / name).symlink_to(shutil.which(name))
    return f"{tmp_path / 'bin'}:{folder}"


def test_without_pdsh_the_nodes_of_a_file_are_reached_by_ssh(start, tmp_path):
    (tmp_path / "nodes").write_text("# the cluster\nuser@node1 slots=8\n\nnode2  # the second\n")
    environment = {
        "NODE_FILE": str(tmp_path / "nodes"),
        "PATH": without_pdsh(tmp_path),
        "PASS_ENV": "SECRET_KEY",
    }
    environment["SECRET_KEY"] = "passed"
    fakes = {"ssh": SSH, "python": PYTHON}
    code, output = finish(
        start(["bash", "run_post_train_multinode.sh", *HARD], fakes, **environment)
    )
    assert code == 0, output
    assert {"user@node1: hello from user@node1", "node2: hello from node2"} <= set(
        output.splitlines()
    )
    for node in ("user@node1", "node2"):
        recorded = (tmp_path / f"log-{node}.launcher").read_text()
        assert (
            "".join(f"[{argument}]\n" for argument in HARD) in recorded
            and "SECRET_KEY=passed" in recorded
        )
        assert "[--rdzv-endpoint=node1:29500]" in recorded


def test_nothing_starts_if_a_node_is_unreachable_or_has_no_repository(start, tmp_path):
    environment, fakes = {"PATH": without_pdsh(tmp_path)}, {"ssh": SSH, "python": PYTHON}
    code, output = finish(
        start(["bash", "run_post_train_multinode.sh"], fakes, NODES="node1,broken", **environment)
    )
    assert code == 2 and "cannot reach a node, or it has no repository" in output
    environment |= {"NODES": "node1", "REMOTE_DIR": "/no where"}
    code, output = finish(start(["bash", "run_post_train_multinode.sh"], fakes, **environment))
    assert code == 2 and "node1: ls: cannot access '/no where/scripts" in output
    assert not list(tmp_path.glob("*.launcher"))


@pytest.mark.parametrize("program", ["pdsh", "ssh"])
def test_stopping_the_launcher_stops_the_nodes(start, tmp_path, program):
    environment, log = {"NODES": "node1", "WAIT": "1"}, tmp_path / "log"
    if program == "ssh":
        environment["PATH"], log = without_pdsh(tmp_path), tmp_path / "log-node1"
    os.mkfifo(f"{log}.waits")
    fakes = {program: {"pdsh": PDSH, "ssh": SSH}[program], "python": PYTHON}
    launcher = start(["bash", "run_post_train_multinode.sh"], fakes, **environment)
    wait_for(f"{log}.waits")
    launcher.terminate()
    code, output = finish(launcher)
    assert code == 1 and Path(f"{log}.ended").exists(), output


def test_an_invalid_list_of_nodes_is_rejected(start):
    code, output = finish(
        start(["bash", "run_post_train_multinode.sh"], {"pdsh": "exit 1"}, NODES="a,b,a")
    )
    assert code == 2 and "NODES must list each node once, got more than once: a" in output


@pytest.mark.parametrize("srun_code, requeued", [(0, False), (75, True)])
def test_slurm_starts_each_node_and_requeues_after_exit_code_75(
    start, tmp_path, srun_code, requeued
):
    scontrol = 'echo "scontrol $*" >> "$LOG.slurm"; [ "$1" != show ] || printf "n1\\nn2\\n"\n'
    srun = (
        'printf "%s " "$MASTER_ADDR" "$NNODES" "$NPROC_PER_NODE" "$@" >> "$LOG.slurm"; echo >> '
        '"$LOG.slurm"\n'
    )
    # the first start ends with 1
    srun += 'echo "$RDZV_ID $MAX_RESTARTS" >> "$LOG.ids"; [ "$RDZV_ID" != 7-0-0 ] || exit 1\n'
    fakes = {
        name: "#!/usr/bin/env bash\n" + text
        for name, text in [("scontrol", scontrol), ("srun", srun)]
    }
    fakes["srun"] += f"exit {srun_code}\n"
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    shutil.copy(ROOT / "scripts/post_train/slurm.sbatch", tmp_path / "spooled")  # Slurm runs a copy
    code, output = finish(start(["bash", tmp_path / "spooled", "--eta", "1 2"], fakes, **job))
    assert code == (0 if requeued else srun_code), output
    hostnames, started, again, *after = (tmp_path / "log.slurm").read_text().splitlines()
    assert started == again
    assert (tmp_path / "log.ids").read_text() == "7-0-0 0\n7-0-1 0\n"
    assert hostnames == "scontrol show hostnames n[1-2]"
    assert started.startswith("n1 2 8 ") and started.endswith(
        "bash scripts/post_train/train_grpo.sh --eta 1 2 "
    )
    assert " --cpus-per-task=96 " in started
    assert after == (["scontrol requeue 7"] if requeued else [])


# --- run_post_train.sh ----------------------------------------------------------------------------

# With -c it prints the number of GPUs; every other command is printed.
TRAINING = """#!/usr/bin/env bash
case "$*" in
    *driver_problem*) echo "driver 550 is too old" ;;
    "-c "*) echo "$GPUS" ;;
    *) printf '[%s]\\n' "$@" ;;
esac
"""
MINIATURE = ["post_train.py", "--config", "configs/miniature.yaml"]
FULL_SIZE = ["post_train.py", "--config", "configs/hunyuanvideo15_480p_8gpu.yaml"]
EIGHT = ["-m", "scripts.launch", "--standalone", "--nproc_per_node=8", "--shutdown-timeout=240"]
REFERENCE = "--pretrained_model_root ./ckpts --learning_rate 1e-5 --sp_size 2 --enable_fsdp --max_steps 10000".split()


@pytest.fixture
def first_command(start, tmp_path):
    """A function that runs run_post_train.sh in a copy of the repository, and returns what it
    starts and its stderr.
    """
    copy = tmp_path / "repository"
    (copy / "scripts" / "post_train").mkdir(parents=True)
    (copy / "scripts" / "setup.sh").write_text("")
    for script in ("run_post_train.sh", "scripts/post_train/common.sh"):
        shutil.copy(ROOT / script, copy / script)

    def run(*flags, gpus=0, cores=1, link=None, **environment):
        environment = {"GPUS": str(gpus)} | environment
        script = copy / "run_post_train.sh"
        if link:
            link.symlink_to(script)
        commands = {"python": TRAINING, "nproc": f"#!/bin/sh\necho {cores}\n"}
        process = start(["bash", link or script, *flags], commands, **environment)
        code, output = finish(process)
        assert code == 0, output
        lines = output.splitlines()
        started = [line[1:-1] for line in lines if line.startswith("[")]
        return started, "\n".join(line for line in lines if not line.startswith("["))

    return run


def test_without_a_named_model_the_miniature_is_trained_also_on_a_gpu_machine(first_command):
    started, messages = first_command(gpus=8)
    assert started == MINIATURE
    assert "training configs/miniature.yaml, because no flag names a model" in messages
    started, _ = first_command("--eta", "0.5", "--max_steps=2", "--output_dir", "outputs/mine")
    assert started == [*MINIATURE, "--eta", "0.5", "--max_steps=2", "--output_dir", "outputs/mine"]
    assert "--nproc_per_node=2" in first_command(NPROC="2")[0]


def test_the_first_command_uses_two_cores_and_trains_as_many_videos(first_command):
    config = load_config(ROOT / "configs" / "miniature.yaml")
    for flags in ([], MINIATURE[1:]):
        started, _ = first_command(*flags, cores=4)
        assert "--nproc_per_node=2" in started
        program = started.index("post_train.py")
        command = parse(started[program + 1 :])
        assert num_rollouts(command.config, 2) == num_rollouts(config, 1)
        assert command.config.model.num_threads == 1
        assert first_command(*flags, cores=4, NPROC="1")[0] == MINIATURE
    assert first_command(*MINIATURE[1:], "--batch_size", "8", cores=4)[0] == [
        *MINIATURE,
        "--batch_size",
        "8",
    ]


@pytest.mark.parametrize(
    "flags",
    [REFERENCE, ["--transformer_version", "480p_t2v"]],
)
def test_flags_of_the_reference_that_name_a_model_start_a_run_at_full_size(first_command, flags):
    assert first_command(*flags, gpus=8)[0] == [*EIGHT, *FULL_SIZE, *flags]


def test_a_named_config_runs_on_all_gpus_and_a_miniature_in_one_process(first_command):
    named = ["--config", "configs/wan21_8gpu_nft.yaml"]
    assert first_command(*named, gpus=8)[0] == [*EIGHT, "post_train.py", *named]
    assert first_command("--config=configs/miniature_wan.yaml", gpus=8)[0] == [
        "post_train.py",
        "--config=configs/miniature_wan.yaml",
    ]
    started, messages = first_command(*named, gpus=0)
    assert started == ["post_train.py", *named] and messages == "driver 550 is too old"


def test_processes_of_one_machine_do_not_need_its_name(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import os\nprint(os.environ['MASTER_ADDR'])\n")
    unknown_name = (
        "import socket, sys; socket.getfqdn = lambda *_: 'laptop.invalid'; "
        "from scripts.launch import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [python(), "-c", unknown_name, "--standalone", "--nproc_per_node=2", str(worker)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["localhost"] * 2, done.stderr
