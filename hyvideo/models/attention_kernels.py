"""Choice of the attention kernel of this process, by a trial of each candidate."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend

BACKENDS = {
    "flash3": SDPBackend.FLASH_ATTENTION,  # replaces torch's FlashAttention 2
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# According to torch's sources, older versions may be wrong for lengths that are not a multiple of
# 128; not tested here.
_MIN_CUDNN = 91501
_MAX_CUDNN_HEAD_DIM = 128  # on every GPU; some support 256
# relative difference of gradients from those of FlashAttention; rounding in bf16 is 3e-3
_GRADIENT_TOLERANCE = 1e-2
_kernel = "torch"  # of this process
_sageattn: Callable[..., Tensor]  # of the package, for the kernel "sage"


class Shape(NamedTuple):
    """Inputs of attention for one sample."""

    heads: int = 16
    head_dim: int = 128
    tokens: int = 2048
    dtype: torch.dtype = torch.bfloat16


class Choice(NamedTuple):
    """The kernel of a process, or ``torch`` for torch's own choice, and why faster ones are not
    used, by kernel.
    """

    kernel: str
    rejected: dict[str, str]


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention by the kernel of this process.

    Shape of each: (batch, heads, tokens, head dim).

    torch requests the log-sum-exp from cuDNN only if a gradient is needed, and cuDNN may choose
    another kernel for each case. It is always requested here, so that rollout and update compute
    the same numbers.
    """
    if _kernel == "sage":
        return _sageattn(query, key, value, tensor_layout="HND", is_causal=False)
    if _kernel == "cudnn" and query.is_cuda and fits_cudnn(query, key):
        return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[0]
    return F.scaled_dot_product_attention(query, key, value)


def fits_cudnn(query: Tensor, key: Tensor) -> bool:
    """Return whether cuDNN's kernel supports the inputs; torch chooses another kernel for
    others.
    """
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    head_dim = query.shape[-1]
    has_lengths = query.shape[-2] > 1 and key.shape[-2] > 1
    return is_half and has_lengths and head_dim % 8 == 0 and head_dim <= _MAX_CUDNN_HEAD_DIM


def choose_kernel(
    setting: str,
    shape: Shape,
    device: torch.device,
    *,
    with_gradient: bool = True,
    gather: Callable[[dict], list[dict]] = lambda found: [found],
) -> Choice:
    """Try the candidates for ``attention_kernel`` and use the first without a problem on any rank.

    ``gather`` returns the problems of all ranks, by kernel. Raises ValueError if ``setting`` names
    a kernel with one.
    """
    use("torch")
    names = candidates(setting, device)
    if not names:
        return Choice("torch", {})
    # the first call would reset the order of kernels
    scaled_dot_product(*_inputs(Shape(tokens=8), device))
    order = torch._C._get_sdp_priority_order()
    by_rank = gather(
        {name: problem_of(name, shape, device, with_gradient=with_gradient) for name in names}
    )
    rejected: dict[str, str] = {}
    for name in by_rank[0]:
        answers = [found.get(name, "another rank does not have it") for found in by_rank]
        problem = next(filter(None, answers), None)
        if not problem:
            use(name)
            return Choice(name, rejected)
        rejected[name] = problem
    if setting != "auto":
        raise ValueError(
            f"attention_kernel {setting} cannot be used: {rejected[setting]}. Set attention_kernel "
            "auto"
        )
    use("torch")
    torch._C._set_sdp_priority_order(order)
    return Choice("torch", rejected)


def candidates(setting: str, device: torch.device) -> list[str]:
    """Return the kernels to try for ``attention_kernel``, in order; on a CPU only SageAttention's,
    if requested.

    On Hopper, the published rate of cuDNN's kernel is 1.6 times that of FlashAttention 2, and
    FlashAttention 3 is close to cuDNN. torch also prefers cuDNN on the B200; the B300 is 10.3.
    """
    if setting == "torch" or device.type != "cuda" and setting != "sage":
        return []
    if setting != "auto":
        return [setting]
    capability = torch.cuda.get_device_capability(device)
    cudnn = torch.backends.cudnn.version() or 0
    has_fa3 = capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None
    has_cudnn = capability in ((9, 0), (10, 0), (10, 3)) and cudnn >= _MIN_CUDNN
    found = []
    if has_fa3:
        found.append("flash3")
    if has_cudnn:
        found.append("cudnn")
    return [*found, "flash", "efficient"]


def problem_of(
    kernel: str, shape: Shape, device: torch.device, *, with_gradient: bool
) -> str | None:
    """Return why a kernel cannot be used, or None. The process uses it afterwards.

    With ``with_gradient``, it must run backward, compute the same numbers with and without
    gradient, and have finite gradients close to those of FlashAttention. Kernels pad lengths to a
    multiple of 128, so that one is tried that is 64 more than such a multiple, too: there, cuDNN's
    kernel has had faults.
    """
    if kernel == "sage" and with_gradient:
        return "it has no backward pass"
    if kernel == "sage" and importlib.util.find_spec("sageattention") is None:
        return (
            "it is not installed: pip install --no-build-isolation "
            "git+https://github.com/thu-ml/SageAttention"
        )
    try:
        use(kernel)
        inputs = [tensor.requires_grad_(with_gradient) for tensor in _inputs(shape, device)]
        if kernel in BACKENDS and SDPBackend(torch._fused_sdp_choice(*inputs)) != BACKENDS[kernel]:
            mode = ""
            if torch.are_deterministic_algorithms_enabled():
                mode = " and deterministic algorithms"
            return (
                f"torch does not support it with {shape.dtype}, head dimension "
                f"{shape.head_dim}{mode} on this GPU"
            )
        with torch.no_grad():
            scaled_dot_product(*inputs)
        if with_gradient:
            for tokens in dict.fromkeys([shape.tokens, shape.tokens // 128 * 128 + 64]):
                problem = _gradient_problem(kernel, shape._replace(tokens=tokens), device)
                if problem:
                    return problem
    # A package may be missing or built for another torch or GPU, and memory may be too small.
    except (
        ImportError,
        OSError,
        RuntimeError,
        TypeError,
        AttributeError,
        ValueError,
        AssertionError,
    ) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _gradient_problem(kernel: str, shape: Shape, device: torch.device) -> str | None:
    """Return what is wrong with a kernel's outputs and gradients for random inputs, or None."""
    inputs = _inputs(shape, device)
    with torch.no_grad():
        sampled = scaled_dot_product(*inputs)
    trained, gradients = _with_gradients(inputs)
    if not torch.equal(sampled, trained):
        return "its outputs with and without gradient differ"
    del sampled, trained
    if not all(gradient.isfinite().all() for gradient in gradients):
        return f"its gradients for {shape.tokens} tokens contain NaN or inf"
    if kernel == "flash":
        return None
    try:
        use("flash")
        if SDPBackend(torch._fused_sdp_choice(*inputs)) != SDPBackend.FLASH_ATTENTION:
            return None  # nothing to compare with
        _, expected = _with_gradients(inputs)
    finally:
        use(kernel)
    for name, gradient, other in zip(("query", "key", "value"), gradients, expected):
        difference = ((gradient - other).float().norm() / other.float().norm()).item()
        if not difference <= _GRADIENT_TOLERANCE:
            found = (
                f"its gradient of the {name} for {shape.tokens} tokens differs from "
                "FlashAttention's"
            )
            return f"{found} by {100 * difference:.3g} %"
    return None


def _with_gradients(inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return attention and the gradients of query, key and value of its weighted sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    attended = scaled_dot_product(*leaves)
    gradients = torch.autograd.grad(attended, leaves, grad_outputs=inputs[0])
    return attended.detach(), list(gradients)


def use(kernel: str) -> None:
    """Use a kernel in this process wherever it supports the inputs; ``torch`` keeps the order of
    torch's kernels.
    """
    global _kernel, _sageattn
    _kernel = kernel
    if kernel == "sage":  # its kernels are not made for torch.compile
        _sageattn = torch.compiler.disable(importlib.import_module("sageattention").sageattn)
    if torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()
    if kernel == "flash3":
        torch_attention.activate_flash_attention_impl("FA3")
    if kernel in BACKENDS:
        first = (
            BACKENDS[kernel],
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        )
        others = torch._C._get_sdp_priority_order()
        torch._C._set_sdp_priority_order(list(dict.fromkeys([*map(int, first), *others])))


def _inputs(shape: Shape, device: torch.device) -> list[Tensor]:
    """Return random query, key and value in a block's memory layout.

    Shape of each: (1, heads, tokens, head dim).
    """
    size = 3, 1, shape.tokens, shape.heads, shape.head_dim
    return list(torch.randn(size, device=device, dtype=shape.dtype).transpose(2, 3))
