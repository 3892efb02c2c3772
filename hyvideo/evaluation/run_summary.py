"""Lines that a run prints in the end, and the kernel that it names at its start."""

import json
from pathlib import Path

import torch

from hyvideo.config.sections import ModelSettings
from hyvideo.data.templates import fill
from hyvideo.evaluation.validation import Validation
from hyvideo.models.attention_kernels import profiled_attention_kernel
from hyvideo.models.sizes import read_architecture
from hyvideo.pipelines.grpo_pipeline import DTYPES
from hyvideo.records.metrics_file import whole_lines

_PROFILED_TOKENS = 2048  # at most; more take a CPU seconds, and run on the same kernel


def attention_kernel(settings: ModelSettings, sp_size: int, size: tuple[int, int, int], device: torch.device) -> str:
    """Name of the kernel that a call with a rank's heads ran on, perhaps shortened: some are hundreds of letters."""
    model = read_architecture(settings.pretrained_model_root, settings.transformer_version)
    heads = max(1, model.num_attention_heads // sp_size)
    tokens = min(_PROFILED_TOKENS, model.image_tokens(*size))
    kernel = profiled_attention_kernel(device, DTYPES[settings.dtype], heads, model.attention_head_dim, tokens)
    return kernel if len(kernel) <= 120 else f"{kernel[:120]}..."


def print_summary(output_dir: Path, iteration: int, validation: Validation | None) -> None:
    """Prints the reward before and after with its spread, and where the videos and a picture of both are."""
    values: dict = {"before": {}, "after": {}, "rewards": []}
    if validation:
        values["before"], values["after"] = (validation.measures(k) for k in (0, iteration))
        values["videos"], values["folders"] = len(validation.prompts), [validation.folder(k) for k in (0, iteration)]
        values["size"], values["weights"] = validation.size, validation.scorer.weights
    if values["before"] and values["after"]:
        values["picture"] = validation.picture(iteration)
    else:
        rewards = [json.loads(line)["reward/mean"] for _, line in whole_lines(output_dir / "metrics.jsonl")]
        values["rewards"] = [reward for reward in rewards if reward is not None]
    template = Path(__file__).with_name("summary.txt.jinja")
    print(fill(template, output_dir=output_dir, iteration=iteration, **values))
