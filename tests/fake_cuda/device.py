"""A fake CUDA device: the project's code runs on FakeTensors of device "cuda", without a GPU.

Nothing is computed. A tensor on the wrong device raises as on a GPU, autocast is CUDA's, and
`Count` counts the work that a GPU would do. Import this module first in a new process: torch must
not have looked for CUDA yet. Numerical results, the choice of kernels, and fusion by a compiler are
not covered.
"""

import collections
import ctypes
import gc
import hashlib
import importlib.util
import os
import subprocess
import tempfile
import weakref
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def _load() -> ctypes.CDLL:
    """Compile guard.cpp against the installed torch, once per version of both; return the loaded
    library.
    """
    root = Path(importlib.util.find_spec("torch").origin).parent
    version = (root / "version.py").read_bytes()
    key = hashlib.sha256(SOURCE.read_bytes() + version + str(root).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}" / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        places = [f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run(
            [
                "g++",
                "-std=c++20",
                "-O0",
                "-shared",
                "-fPIC",
                str(SOURCE),
                "-o",
                str(draft),
                *places,
            ],
            check=True,
        )
        draft.rename(library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


_library = _load()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.fake_cuda import streams  # noqa: E402

streams.install(_library)
attention_kernel = "flash"  # or "cudnn": which kernel `_attention` calls
_stock_attention = F.scaled_dot_product_attention


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """Call the kernel that a GPU would use: a CPU build of torch cannot choose kernels for CUDA."""
    if not query.is_cuda or attn_mask is not None or query.dtype == torch.float32:
        return _stock_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attention_kernel == "cudnn":
        # torch requests the log-sum-exp only for a backward pass.
        with_gradient = torch.is_grad_enabled() and any(
            part.requires_grad for part in (query, key, value)
        )
        operator, mask = torch.ops.aten._scaled_dot_product_cudnn_attention, (None, with_gradient)
    else:
        operator, mask = torch.ops.aten._scaled_dot_product_flash_attention, ()
    return operator(query, key, value, *mask, dropout_p, is_causal, False, **options)[0]


F.scaled_dot_product_attention = _attention
torch.cuda.amp.common.amp_definitely_not_available = lambda: False
torch.cuda.is_bf16_supported = lambda: True
torch.cuda.mem_get_info = lambda device: (80 * 2**30, 80 * 2**30)
torch.cuda.memory_reserved = torch.cuda.memory_allocated = lambda device: 0


def _never(*_arguments):
    raise AssertionError("FakeTensors have no data")


# CUDA builds have a fused kernel for RMS norm, which autograd then uses.
_KERNELS = torch.library.Library("aten", "IMPL")
for _name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
    _KERNELS.impl(_name, _never, "CUDA")

# Operators that wait for the GPU, because the host needs their result or its shape.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
}
_RESULTS = {"_local_scalar_dense": 1.0, "equal": True}  # returned for tensors without data
_COPIES = {"_to_copy", "copy_"}
# Operators that move no data.
_FREE = set(
    """view _unsafe_view _reshape_alias reshape transpose permute t expand squeeze unsqueeze unflatten unfold slice
    select narrow split split_with_sizes chunk unbind alias detach lift_fresh as_strided diagonal view_as_real
    view_as_complex empty empty_like empty_strided new_empty new_empty_strided
    all_gather_copy_in""".split()  # the last copies only this rank's shards
)
_COUNTED = {"aten", "fsdp"}  # namespaces of operators
_SMALL = 64 * 2**10  # bytes; the driver copies these at once from any memory


class Count(TorchDispatchMode):
    """Dispatch mode that counts the work a GPU would do.

    Bytes are those that memory-bound operators read and write, expanded tensors once. Matrix
    products and attention are counted in FLOP instead, convolutions in both. Memory is what
    operators allocate within the mode, without weights and inputs.
    """

    def __init__(self):
        super().__init__()
        self.live = 0
        self._held: dict[int, int] = {}  # bytes by storage
        self._pinned: list[torch.UntypedStorage] = []
        self.clear()

    def clear(self) -> None:
        """Reset the counts; allocated memory stays counted."""
        # of memory-bound operators, by name
        self.kernels, self.bytes = collections.Counter(), collections.Counter()
        self.flop = collections.Counter()  # by operator
        # by operator; blocking copies to the host are among them
        self.waits = collections.Counter()
        # by kind of host memory and direction, e.g. "pinned to device"
        self.copies = collections.Counter()
        self.places = collections.Counter()  # operators by thread, device and stream
        self.log_sum_exp = set()  # whether cuDNN's attention also returned the log-sum-exp
        self.peak = self.live

    @property
    def teraflop(self) -> dict[str, float]:
        """Matrix products, attention and convolutions, forward and backward."""
        kinds = {"attention": "scaled_dot", "convolutions": "convolution"}
        found = {
            kind: sum(flop for name, flop in self.flop.items() if part in name)
            for kind, part in kinds.items()
        }
        found["products"] = sum(self.flop.values()) - sum(found.values())
        return {kind: flop / 1e12 for kind, flop in found.items() if flop}

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # a tensor of tensors, which are counted instead
        options = options or {}
        if operator.is_view:  # no work and no memory
            return operator(*arguments, **options)
        name = operator.overloadpacket.__name__
        needs_data = name in _RESULTS and isinstance(arguments[0], FakeTensor)
        result = _RESULTS[name] if needs_data else operator(*arguments, **options)
        given = [
            leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, torch.Tensor)
        ]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if options.get("pin_memory") or name == "_pin_memory":
            self._pinned += [tensor.untyped_storage() for tensor in made]
        if not any(tensor.is_cuda for tensor in given + made):
            return result
        if name in _WAITS:
            self.waits[name] += 1
        if name in _COPIES and len({tensor.device.type for tensor in given + made}) > 1:
            self._count_copy(name, given, made, arguments, options)
        for tensor in given:
            self._hold(tensor, new=False)
        for tensor in made:
            self._hold(tensor)
        if name not in _FREE:
            self.places[streams.current()] += 1
        if operator.namespace in ("c10d", "fsdp") or "scaled_dot_product" in name:
            streams.note(streams.current()[2], name)
        if "cudnn_attention" in name and "backward" not in name:
            self.log_sum_exp.add(arguments[4])
        if name not in _FREE and operator.namespace in _COUNTED:
            flop = _flop(name, given, made, arguments)
            self.flop[name] += flop
            if not flop or "convolution" in name:
                self.kernels[name] += 1
                outputs = given[0] if name == "copy_" else options.get("out")  # only written
                moved = [tensor for tensor in given if tensor is not outputs] + made
                self.bytes[name] += sum(_bytes(tensor) for tensor in moved if tensor.is_cuda)
        return result

    def _count_copy(self, name, given, made, arguments, options) -> None:
        source, goal = (given[1], given[0]) if name == "copy_" else (given[0], made[0])
        waits = not (
            options.get("non_blocking") or (name == "copy_" and len(arguments) > 2 and arguments[2])
        )
        host, way = (source, "to device") if goal.is_cuda else (goal, "to host")
        memory = (
            "small" if _bytes(host) <= _SMALL else "pinned" if self._is_pinned(host) else "pageable"
        )
        self.copies[f"{memory} {way}"] += 1
        if waits:
            self.waits[f"copy {way}"] += 1

    def _is_pinned(self, host) -> bool:
        """Return whether a tensor was allocated as pinned memory, which FakeTensors do not
        record.
        """
        return any(host.untyped_storage()._cdata == storage._cdata for storage in self._pinned)

    def _hold(self, tensor, *, new: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() * new
        if not tensor.is_cuda or key in self._held:
            return
        self._held[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._held.pop(key)


def _bytes(tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flop(name: str, given: list, made: list, arguments: tuple) -> int:
    if name in ("convolution", "convolution_backward"):
        is_backward = name == "convolution_backward"
        output, weight = (given[0], given[2]) if is_backward else (made[0], given[1])
        # gradients of the input and of the weight
        passes = sum(arguments[-1][:2]) if is_backward else 1
        return passes * 2 * output.numel() * weight.numel() // weight.shape[0]
    if name in ("mm", "addmm"):
        (rows, inner), (_, columns) = (tensor.shape for tensor in given[-2:])
        return 2 * rows * inner * columns
    if name in ("bmm", "baddbmm"):
        (batch, rows, inner), (_, _, columns) = (tensor.shape for tensor in given[-2:])
        return 2 * batch * rows * inner * columns
    if "scaled_dot_product" in name:
        is_backward = "backward" in name
        query, key = given[is_backward : is_backward + 2]
        products = 10 if is_backward else 4
        return products * query.shape[:3].numel() * key.shape[2] * query.shape[3]
    return 0


def on_device(module: torch.nn.Module, dtype: torch.dtype, device: str = "cuda") -> None:
    """Replace meta parameters and buffers of a module by ones on the fake device.

    Requires the FakeTensorMode.
    """
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(
                    torch.empty(value.shape, dtype=dtype, device=device), value.requires_grad
                )
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)


def fake_mode() -> FakeTensorMode:
    """Return the mode in which tensors are created; real tensors of the host are allowed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def prepare_process():
    """Configure torch and return a schedule of 20 steps, whose timesteps are real tensors on the
    host.
    """
    from hyvideo.schedulers.schedule import Schedule

    torch.set_num_threads(1)
    gc.freeze()  # objects of the imports are not garbage
    schedule = Schedule.build("sage_grpo", num_steps=20, shift=5.0, eta=0.5)
    assert len(schedule.timesteps) == len(schedule.ends)  # computed outside of the fake mode
    return schedule
