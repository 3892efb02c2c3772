"""A Python interpreter that has already imported torch and hyvideo; `python` returns its path.

    subprocess.run([python(), "post_train.py", "--eta", "1"], ...)

`python(preload)` is an interpreter that has imported that module instead, and what the module
imports.

The program at that path connects to a server and passes arguments, environment, working directory
and output. The server forks a process that does the work; signals and the exit code are passed on.
All pytest workers share one server, which the first of them starts and which ends with pytest.
"""

import atexit
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OWNER = "FORKED_FOR"  # environment variable: PID of the process with which the server ends

# Modules that hyvideo imports lazily and that most programs need.
LATE = (
    "av",
    "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5",
    "hypothesis",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "mpl_toolkits.mplot3d",
    "pytest",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
)

# Preloads what nearly all programs import at their start, without torch.
LIGHT = "hyvideo.settings.command_line"

# Keep freed memory in the process: otherwise page faults take a tenth of the time of small models.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}

# The client program. It passes its file descriptors and signals to the forked process, which ends
# when the client ends.
CLIENT = """
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(__file__), "socket"))
job = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(job).to_bytes(8, "little")], [0, 1, 2])
server.sendall(job)
pid = int.from_bytes(server.recv(8), "little")
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = os.waitstatus_to_exitcode(int.from_bytes(server.recv(8), "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def become_server_owner() -> None:
    """Make this process the owner of the server, for all processes that it starts."""
    if OWNER not in os.environ:
        os.environ[OWNER] = str(os.getpid())
        shutil.rmtree(_folder(), ignore_errors=True)  # left by an earlier process with the same PID


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"forked-{os.getuid()}-{os.environ[OWNER]}"


def python(preload: str = "") -> str:
    """Return the path of the client program, and start the server if it is not running."""
    become_server_owner()
    folder = _folder() / preload
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = folder / "python"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            # packages may lie in a folder of PYTHONPATH
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            command = [
                sys.executable,
                "-m",
                "tests.forked",
                os.environ[OWNER],
                str(folder),
                preload,
            ]
            server = subprocess.Popen(
                command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
            )
            assert server.stdout.readline() == "ready\n", (
                "the server of forked processes did not start"
            )
            program.write_text(f"#!{sys.executable} -IS\n{CLIENT}")
            program.chmod(0o700)
    return str(program)


def cache_models() -> None:
    """Cache untrained models and the random weights of each seed, for this process and processes
    forked from it.
    """
    from hyvideo.models import encoders, loading
    from hyvideo.weights import weight_files

    draw = functools.lru_cache(4000)(weight_files.draw_tensor)
    weight_files.draw_tensor = lambda seed, name, shape, device="cpu": draw(
        seed, name, tuple(shape), str(device)
    ).clone()
    loading.new_model = built_once(loading.new_model)  # on the meta device
    encoders._random = built_once(encoders._random)


def built_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds a model only for new arguments and otherwise returns a copy of
    the first one.
    """
    models: dict[str, Any] = {}

    @functools.wraps(build)
    def copy_or_build(*arguments: Any, **settings: Any) -> Any:
        key = repr((arguments, settings))
        if key not in models:
            models[key] = build(*arguments, **settings)
        return _copy(models[key])

    return copy_or_build


def _copy(module: Any) -> Any:
    """Return a copy of a module with its own submodules, parameters and hooks; faster than
    `copy.deepcopy`.
    """
    copied = object.__new__(type(module))
    vars(copied).update(
        (name, value.copy() if type(value) in (dict, OrderedDict, set) else value)
        for name, value in vars(module).items()
    )
    copied._modules.update(
        {name: _copy(part) for name, part in module._modules.items() if part is not None}
    )
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = _copied_values(parameter)
            copied._parameters[name] = type(parameter)(values, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            copied._buffers[name] = _copied_values(buffer)
    return copied


def _copied_values(tensor: Any) -> Any:
    """Return a tensor with its own values, if it has any."""
    return tensor.data if tensor.is_meta else tensor.detach().clone()


# --- the server -----------------------------------------------------------------------------------


class Server:
    """Forks a process per connection, reports its exit status, and kills it if the connection
    closes first.
    """

    def __init__(self, folder: Path):
        self.events = select.poll()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)
        self.events.register(self.listener, select.POLLIN)
        # process, client, pidfd; by both descriptors
        self.running: dict[int, tuple[int, socket.socket, int]] = {}

    def run(self, owner: int) -> None:
        """Serve until the owner process has ended."""
        owner_pidfd = os.pidfd_open(owner)
        self.events.register(owner_pidfd, select.POLLIN)
        while owner_pidfd not in (ready := [descriptor for descriptor, _ in self.events.poll()]):
            for descriptor in ready:
                if descriptor == self.listener.fileno():
                    self.begin(self.listener.accept()[0])
                elif descriptor in self.running:
                    self.end(*self.running[descriptor])
        for pid, *_ in self.running.values():
            _kill(pid)

    def begin(self, client: socket.socket) -> None:
        """Fork a process for a client."""
        pid = os.fork()
        if pid == 0:
            self.listener.close()
            _run_for_client(client)
        pidfd = os.pidfd_open(pid)
        self.events.register(client, select.POLLRDHUP)
        self.events.register(pidfd, select.POLLIN)
        self.running[client.fileno()] = self.running[pidfd] = (pid, client, pidfd)
        _send(client, pid)

    def end(self, pid: int, client: socket.socket, pidfd: int) -> None:
        """Handle the end of a process or of its client."""
        if not select.select([pidfd], [], [], 0)[0]:
            _kill(pid)
        _send(client, os.waitpid(pid, 0)[1])
        for descriptor in (client.fileno(), pidfd):
            self.events.unregister(descriptor)
            del self.running[descriptor]
        client.close()
        os.close(pidfd)


def _import_all() -> None:
    import torch

    import hyvideo

    torch.set_num_threads(1)
    cache_models()
    for name in LATE:
        with suppress(ModuleNotFoundError):  # a machine for GPU checks lacks av
            importlib.import_module(name)
    importlib.import_module("PIL.Image").init()  # imports the formats of pictures
    # transformers builds a table of all its models when a process first reads weights: a second
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    # torchrun calls inspect.stack for its log; with thousands of modules, that takes seconds per
    # launch.
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for module in pkgutil.walk_packages(hyvideo.__path__, "hyvideo."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.startswith("hyvideo"):
                raise  # otherwise a package that only this module needs, such as uvicorn
    for root in ("assets/miniature", "tests/shallow_miniature"):  # the models of smoke runs
        config = hyvideo.settings.command_line.load_config(
            "configs/smoke.yaml", pretrained_model_root=root
        )
        encoder, _ = hyvideo.loading.model_setup.load_encoder(config, torch.device("cpu"))
        encoder([hyvideo.data.prompts.Request("a red circle")])  # loads the text encoder
        hyvideo.models.loading.load_transformer(root, "miniature", random_weights_seed=0)
    for template in (ROOT / "hyvideo").rglob("*.j*"):
        if template.suffix in (".jinja", ".j2"):
            hyvideo.files.templates._pages(template.parent, ".html" in template.name).get_template(
                template.name
            )


def _kill(pid: int) -> None:
    """Kill a process and its children, or only the process if it has no group yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _send(client: socket.socket, number: int) -> None:
    try:
        client.sendall(number.to_bytes(8, "little"))
    except OSError:  # the client was killed
        pass


def _run_for_client(client: socket.socket) -> None:
    """Run the client's program in this process."""
    os.setpgid(0, 0)
    size, descriptors, *_ = socket.recv_fds(client, 8, 3)
    job = client.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
    client.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    arguments, environment, cwd = json.loads(job)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os._exit(_exit_code(arguments))


def _exit_code(arguments: list[str]) -> int:
    """Run a program and return its exit code, like the interpreter but without freeing its
    memory.
    """
    try:
        _execute(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


def _execute(arguments: list[str]) -> None:
    while arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    first, *others = arguments
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        exec(compile(others[0], "-c", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = others
        sys.modules.pop(others[0], None)
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def main(owner: int, folder: Path, preload: str) -> None:
    if preload:
        importlib.import_module(preload)
    else:
        _import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()
    server = Server(folder)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server.run(owner)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
