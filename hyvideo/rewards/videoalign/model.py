"""Qwen2-VL with a reward head, which maps videos and questions to three logits.

As in the original, tokens have positions 0, 1, 2... on all axes (no M-RoPE), and rotary frequencies
are rounded to bf16.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hyvideo.models.decoding import use_channels_last
from hyvideo.models.weight_files import truncate
from hyvideo.rewards.videoalign.checkpoint import LABEL, ModelConfig, VideoAlignWeights, plain_name


class RewardModel(nn.Module):
    """The frozen model on one device; ``config`` is a ``Qwen2VLConfig`` with the vocabulary size of
    the weights.
    """

    def __init__(
        self,
        config,
        weights: VideoAlignWeights,
        settings: ModelConfig,
        *,
        reward_token_ids: list[int],
        # add the LoRA to the weights: fewer small matrix products, one more rounding
        merge_lora: bool,
        dtype: torch.dtype,  # of weights and arithmetic
        rope_dtype: torch.dtype,  # precision to which the rotary frequencies are rounded
        device: str | torch.device,
    ):
        from accelerate import init_empty_weights
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
        from transformers import Qwen2VLModel

        super().__init__()
        self.reward_token_ids = reward_token_ids
        # Buffers are not on the meta device, because no checkpoint contains the rotary frequencies.
        with init_empty_weights(include_buffers=False):
            model = Qwen2VLModel(config)
        modules = sorted(
            {name.partition(".lora_")[0] for name in weights.model if ".lora_" in name}
        )
        if modules:
            rank = settings.lora_rank
            lora = LoraConfig(
                r=rank,
                lora_alpha=settings.lora_scale * rank,
                target_modules=modules,
                lora_dropout=0.0,
            )
            inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
        names = {plain_name(name): name for name in model.state_dict()}
        _check_tensors(
            {plain: model.get_parameter(name).shape for plain, name in names.items()}, weights.model
        )
        state = {names[plain]: tensor.to(device, dtype) for plain, tensor in weights.model.items()}
        model.load_state_dict(state, strict=True, assign=True)
        model.to(device)
        if torch.device(device).type == "cuda":
            use_channels_last(model)
        _round_rotary(model, rope_dtype)
        if merge_lora:
            for layer in model.modules():
                if isinstance(layer, LoraLayer):
                    layer.merge()
        self.model = model
        self.head = nn.Linear(*reversed(weights.head.shape), bias=False, device="meta")
        self.head.weight = nn.Parameter(weights.head.to(device, dtype))
        self.requires_grad_(False).eval()

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return raw scores in the order of the reward tokens: VQ, MQ, TA. Shape: (batch, 3)."""
        return self.head(self.reward_states(**inputs))[..., 0]

    def reward_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values_videos: Tensor,
        video_grid_thw: Tensor,
    ) -> Tensor:
        """Return the hidden states at the three reward tokens. Shape: (batch, 3, hidden)."""
        batch, length = input_ids.shape
        # Without position_ids the model would use M-RoPE, unlike the original.
        positions = torch.arange(length, device=input_ids.device).expand(3, batch, length)
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values_videos=pixel_values_videos.to(self.head.weight.dtype),
            video_grid_thw=video_grid_thw,
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        return torch.stack([hidden[input_ids == token] for token in self.reward_token_ids], dim=1)


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


def _check_tensors(expected: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> None:
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
            "\n  ".join([f"{LABEL}: the weights do not fit the base model:", *truncate(problems)])
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
    if model.head.weight.device.type != "cuda":
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
