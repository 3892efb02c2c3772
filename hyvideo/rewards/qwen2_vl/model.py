"""Qwen2-VL with a reward head, frozen: the model behind VideoAlign and HPSv3.

As in both originals, tokens have positions 0, 1, 2... on all axes (no M-RoPE), and rotary
frequencies are rounded to bf16.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyvideo.models.decoding import use_channels_last
from hyvideo.weights.weight_files import truncate, without_wrappers

EMBEDDING = "language_model.embed_tokens.weight"


@dataclass(frozen=True)
class Lora:
    """Rank of a checkpoint's LoRA, and the factor of its product."""

    rank: int
    scale: float
    # add the LoRA to the weights: fewer small matrix products, one more rounding
    is_merged: bool = False


class RewardModel(nn.Module):
    """A frozen ``Qwen2VLModel`` and a head, which reads the hidden states at the reward tokens.

    The head computes in its own dtype, which may be higher than the model's.
    """

    def __init__(
        self,
        label: str,  # begins error messages
        config,  # Qwen2VLConfig with the vocabulary size of the weights
        tensors: Mapping[str, Tensor],  # by `plain_name`; a LoRA pair ends in lora_A and lora_B
        head: nn.Module,
        *,
        reward_token_ids: list[int],
        dtype: torch.dtype,  # of weights and arithmetic, without the head
        rope_dtype: torch.dtype,  # precision to which the rotary frequencies are rounded
        device: str | torch.device,
        lora: Lora | None = None,
    ):
        from accelerate import init_empty_weights
        from peft.tuners.lora import LoraLayer
        from transformers import Qwen2VLModel

        super().__init__()
        self.reward_token_ids = reward_token_ids
        # Buffers are not on the meta device, because no checkpoint contains the rotary frequencies.
        with init_empty_weights(include_buffers=False):
            model = Qwen2VLModel(config)
        if lora:
            _add_lora(model, tensors, lora)
        names = {plain_name(name): name for name in model.state_dict()}
        shapes = {plain: model.get_parameter(name).shape for plain, name in names.items()}
        _check_tensors(label, shapes, tensors)
        state = {names[plain]: tensor.to(device, dtype) for plain, tensor in tensors.items()}
        model.load_state_dict(state, strict=True, assign=True)
        model.to(device)
        if torch.device(device).type == "cuda":
            use_channels_last(model)
        _round_rotary(model, rope_dtype)
        if lora and lora.is_merged:
            for layer in model.modules():
                if isinstance(layer, LoraLayer):
                    layer.merge()
        self.model = model
        self.head = head.to(device)
        self.requires_grad_(False).eval()

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the head's first output at each reward token. Shape: (batch, reward tokens)."""
        return self.head(self.reward_states(**inputs))[..., 0]

    def reward_states(self, input_ids: Tensor, attention_mask: Tensor, **vision: Tensor) -> Tensor:
        """Return the hidden states at the reward tokens in the head's dtype.

        ``vision`` has the patches and grids of images or of videos, by transformers' names. Shape:
        (batch, reward tokens, hidden).
        """
        batch, length = input_ids.shape
        # Without position_ids the model would use M-RoPE, unlike the originals.
        positions = torch.arange(length, device=input_ids.device).expand(3, batch, length)
        for name, value in vision.items():
            if value.is_floating_point():
                vision[name] = value.to(self.model.dtype)
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=False,
            **vision,
        ).last_hidden_state
        states = [hidden[input_ids == token] for token in self.reward_token_ids]
        return torch.stack(states, dim=1).to(next(self.head.parameters()).dtype)


def plain_name(name: str) -> str:
    """Return a tensor's name in Qwen2VLModel, without peft's prefixes, for files of transformers 4
    and 5.
    """
    name = (
        without_wrappers(name)
        .removeprefix("base_model.model.")
        .replace(".base_layer.", ".")
        .replace(".default.", ".")
    )
    if name.startswith(("rm_head.", "lm_head.")):
        return name
    name = name.removeprefix("model.")
    if name.startswith(("visual.", "language_model.")):
        return name
    return f"language_model.{name}"


def by_plain_name(tensors: Mapping[str, Tensor], place: object, label: str) -> dict[str, Tensor]:
    """Return the tensors of a file, or of a file in the folder ``place``, by `plain_name`.

    Raises ValueError if it has two names of one tensor with different values.
    """
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault(plain_name(name), name)
        if first != name and not torch.equal(tensors[first], tensor):
            raise ValueError(
                f"{label}: {first!r} and {name!r} in {place} are the same tensor of the model, but "
                "their values differ; use a file that has only one of them"
            )
    return {plain: tensors[name] for plain, name in names.items()}


def _add_lora(model: nn.Module, tensors: Mapping[str, Tensor], lora: Lora) -> None:
    """Add the modules of the LoRA that the tensors contain, without their weights."""
    from peft import LoraConfig, inject_adapter_in_model

    modules = sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,
        target_modules=modules,
        lora_dropout=0.0,
    )
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)


class _RoundedVisionRotary(nn.Module):
    """The vision tower's rotary embedding with positions, frequencies and angles rounded to
    ``dtype``.
    """

    def __init__(self, rotary: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.rotary = rotary
        self.dtype = dtype

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(self.dtype) * self.rotary.inv_freq.to(
            x.device, self.dtype
        )
        arrange = self.rotary.recomposition_frequencies
        return arrange(angles.cos()), arrange(angles.sin())


def _round_rotary(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the rotary frequencies, which transformers computes in float32, to ``dtype``."""
    if dtype != torch.float32:
        table = model.language_model.rotary_emb.inv_freq
        table.copy_(table.to(dtype).float())
        model.visual.rotary_pos_emb = _RoundedVisionRotary(model.visual.rotary_pos_emb, dtype)


def _check_tensors(
    label: str, expected: Mapping[str, torch.Size], given: Mapping[str, Tensor]
) -> None:
    problems = [f"tensor {name!r} is missing" for name in sorted(expected.keys() - given.keys())]
    problems += [
        f"tensor {name!r} is unexpected" for name in sorted(given.keys() - expected.keys())
    ]
    problems += [
        f"tensor {name!r} has shape {tuple(given[name].shape)}, the model needs {tuple(shape)}"
        for name, shape in expected.items()
        if name in given and given[name].shape != shape
    ]
    if problems:
        raise ValueError(
            "\n  ".join([f"{label}: the weights do not fit the base model:", *truncate(problems)])
        )


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Do not use cuDNN's attention, torch's default on Hopper, within the context.

    With a mask, as for videos of unequal length, and a length of 64 modulo 128, its gradients are
    NaN where the log-sum-exp is below -88.7, which some heads of Qwen2-VL reach (pytorch issue
    196678).
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextmanager
def recomputed(model: RewardModel) -> Iterator[None]:
    """Keep only the inputs of layers in forward passes within the context; backward passes
    recompute the rest.

    Only on a GPU, where memory is scarce. The layers do so in training mode, which changes no
    value: they have no dropout.
    """
    if model.model.device.type != "cuda":
        yield
        return
    options = {
        "use_reentrant": False,
        "context_fn": lambda: (nullcontext(), without_cudnn_attention()),
    }
    model.train().model.gradient_checkpointing_enable(options)
    try:
        yield
    finally:
        model.model.gradient_checkpointing_disable()
        model.eval()
