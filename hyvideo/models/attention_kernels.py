"""The kernel that attention runs on: the order in which torch tries its own, and what a profile of a call shows."""

import importlib.util

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {SDPBackend.CUDNN_ATTENTION: "cuDNN", SDPBackend.FLASH_ATTENTION: "FlashAttention"}
# Older ones may be wrong for lengths that 128 does not divide, by torch's sources; not tried here.
_SOUND_CUDNN = 91501


def order_of_kernels(capability: tuple[int, int], cudnn: int, *, has_fa3: bool) -> list[SDPBackend]:
    """Kernels of attention from the one that torch shall try first; empty leaves the choice to torch.

    On Hopper cuDNN's is published at 1.6 times the rate of FlashAttention 2, and FlashAttention 3 near it. A version of
    ``cudnn`` is as torch counts: 91501 is 9.15.1. With ``has_fa3`` FlashAttention 3 stands in for FlashAttention.
    """
    if capability[0] != 9:
        return []
    fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if has_fa3 or cudnn < _SOUND_CUDNN:
        fast.reverse()
    return [*fast, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def set_order(kernels: list[SDPBackend]) -> None:
    """Has torch try these kernels in this order from now on, in the whole process, and then the others."""
    first = [int(kernel) for kernel in kernels]
    others = [kernel for kernel in torch._C._get_sdp_priority_order() if kernel not in first]
    torch._C._set_sdp_priority_order(first + others)


def use_fastest_kernels() -> str:
    """Sets the order for this process's GPU, with FlashAttention 3 where it is installed; gives the first one's name.

    What it is called with decides which kernel can run: `profiled_attention_kernel` says which one did.
    """
    if not torch.cuda.is_available():
        return "torch"
    capability = torch.cuda.get_device_capability()
    has_fa3 = capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None
    if has_fa3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    kernels = order_of_kernels(capability, torch.backends.cudnn.version() or 0, has_fa3=has_fa3)
    if not kernels:
        return "torch"
    # With its first call torch writes an order of its own over any that was set before.
    _attend(torch.zeros(1, 1, 8, 128, dtype=torch.bfloat16, device="cuda"))
    set_order(kernels)
    return "FlashAttention 3" if has_fa3 else NAMES[kernels[0]]


@torch.no_grad()
def profiled_attention_kernel(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, tokens: int) -> str:
    """Name of the kernel that one call of attention spent its time in; on the CPU that of torch's operator."""
    states = torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
    if torch.device(device).type != "cuda":
        with _Operator() as operator:
            _attend(states)
        return operator.name
    _attend(states)  # the first call loads and builds kernels
    with profile(use_device="cuda") as profiled:
        _attend(states)
        torch.cuda.synchronize(device)
    kernels = [call for call in profiled.key_averages() if call.device_type == DeviceType.CUDA]
    return max(kernels, key=lambda call: call.self_device_time_total).key


class _Operator(TorchDispatchMode):
    """Name of torch's operator of attention in a call; a profiler of the CPU talks on stderr."""

    name = "aten::_scaled_dot_product_attention_math"  # which torch takes apart into products and a softmax

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if "scaled_dot_product" in operator.name():
            self.name = operator.name()
        return operator(*arguments, **(options or {}))


def _attend(states: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(states, states, states)
