"""Choice of the attention kernel: the order in which torch tries its kernels, and the profiled kernel."""

import importlib.util

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {SDPBackend.CUDNN_ATTENTION: "cuDNN", SDPBackend.FLASH_ATTENTION: "FlashAttention"}
# According to torch's sources, older versions may be wrong for lengths that are not a multiple of 128; not tested here.
_MIN_CUDNN = 91501


def kernel_order(capability: tuple[int, int], cudnn: int, *, has_fa3: bool) -> list[SDPBackend]:
    """Return the attention kernels in the order in which torch should try them; an empty list keeps torch's order.

    On Hopper, the published rate of cuDNN's kernel is 1.6 times that of FlashAttention 2, and FlashAttention 3 is close
    to cuDNN. ``cudnn`` is torch's version number: 91501 is 9.15.1. With ``has_fa3``, FLASH_ATTENTION is version 3.
    """
    if capability[0] != 9:
        return []
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if has_fa3 or cudnn < _MIN_CUDNN:
        fast.reverse()
    return [*fast, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def set_order(kernels: list[SDPBackend]) -> None:
    """Make torch try these kernels first, in this order, then the others. Affects the whole process."""
    first = [int(kernel) for kernel in kernels]
    others = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in first]
    torch._C._set_sdp_priority_order(first + others)


def use_fastest_kernels() -> str:
    """Set the kernel order for this process's GPU, with FlashAttention 3 if installed; return the first kernel's name.

    Which kernel runs also depends on the inputs: `profiled_attention_kernel` returns the one that ran.
    """
    if not torch.cuda.is_available():
        return "torch"
    capability = torch.cuda.get_device_capability()
    has_fa3 = capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None
    if has_fa3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    kernels = kernel_order(capability, torch.backends.cudnn.version() or 0, has_fa3=has_fa3)
    if not kernels:
        return "torch"
    # The first attention call resets the order, so make one before setting it.
    _attend(torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16, device="cuda"))
    set_order(kernels)
    return "FlashAttention 3" if has_fa3 else NAMES[kernels[0]]


@torch.no_grad()
def profiled_attention_kernel(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, tokens: int) -> str:
    """Return the name of the slowest kernel of one attention call; on the CPU, the name of torch's operator."""
    states = torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
    if torch.device(device).type != "cuda":
        with _Operator() as operator:
            _attend(states)
        return operator.name
    _attend(states)  # warm-up: the first call loads and builds kernels
    with profile(use_device="cuda") as profiled:
        _attend(states)
        torch.cuda.synchronize(device)
    kernels = [call for call in profiled.key_averages() if call.device_type == DeviceType.CUDA]
    return max(kernels, key=lambda call: call.self_device_time_total).key


class _Operator(TorchDispatchMode):
    """Records the name of torch's attention operator. The CPU profiler is not used because it prints to stderr."""

    name = "aten::_scaled_dot_product_attention_math"  # not dispatched: torch decomposes it into matmuls and softmax

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if "scaled_dot_product" in operator.name():
            self.name = operator.name()
        return operator(*arguments, **(options or {}))


def _attend(states: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(states, states, states)
