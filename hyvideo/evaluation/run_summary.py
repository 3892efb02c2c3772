"""Summary that a run prints at its end, and the attention kernel that it prints at its start."""

from pathlib import Path

import torch

from hyvideo.config.sections import ModelSettings
from hyvideo.data.templates import fill
from hyvideo.evaluation.validation import Validation
from hyvideo.models.attention_kernels import profiled_attention_kernel
from hyvideo.models.sizes import read_architecture
from hyvideo.pipelines.grpo_pipeline import DTYPES
from hyvideo.records.metrics_file import read_metrics

_PROFILED_TOKENS = 2048  # at most; more take seconds on a CPU and run on the same kernel


def attention_kernel(settings: ModelSettings, sp_size: int, size: tuple[int, int, int], device: torch.device) -> str:
    """Run attention with one rank's heads and return the name of its kernel, at most 120 characters of it."""
    model = read_architecture(settings.pretrained_model_root, settings.transformer_version)
    heads = max(1, model.num_attention_heads // sp_size)
    tokens = min(_PROFILED_TOKENS, model.image_tokens(*size))
    kernel = profiled_attention_kernel(device, DTYPES[settings.dtype], heads, model.attention_head_dim, tokens)
    return kernel if len(kernel) <= 120 else f"{kernel[:120]}..."


def print_summary(output_dir: Path, iteration: int, validation: Validation | None) -> None:
    """Print rewards before and after training, and the paths of the videos and of a picture of both."""
    values: dict = {"before": {}, "after": {}, "rewards": []}
    if validation:
        values["before"], values["after"] = (validation.measures(k) for k in (0, iteration))
        values["seen"], values["folders"] = validation.seen, [validation.folder(k) for k in (0, iteration)]
        values["size"], values["weights"] = validation.size, validation.scorer.weights
    if values["before"] and values["after"]:
        values["picture"] = validation.picture(iteration)
    else:
        rewards = [line["reward/mean"] for line in read_metrics(output_dir / "metrics.jsonl")]
        values["rewards"] = [reward for reward in rewards if reward is not None]
    template = Path(__file__).with_name("summary.txt.jinja")
    print(fill(template, output_dir=output_dir, iteration=iteration, **values))
