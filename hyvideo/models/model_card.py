"""README.md of an exported model, as a model card of the Hugging Face Hub, and the license beside it."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyvideo.files.files import read_json
from hyvideo.models.family import License
from hyvideo.models.versions import version_defaults

_NOT_SHOWN = ("missing", "reward_std", "spreads")
_LICENSE_FILE = re.compile(r"(licen[cs]e|notice)([-_. ].*)?", re.IGNORECASE)
_CALL = re.compile(r"(?:(?P<place>in [^:]+): )?(?P<call>(?:\w+ = )?[\w.]+\(.*\))")
_TASKS = {"t2v": "text-to-video", "i2v": "image-to-video", "ti2v": "text-to-video"}
# Settings that the card shows, if they are not empty.
_SHOWN = {
    "objective": "method",
    "sde_type": "sampler of the rollouts",
    "reward_model": "reward",
    "reward_weights": "weights of the reward",
    "prompts_csv": "prompts",
    "videos_csv": "videos",
    "pairs_csv": "pairs",
    "expert": "trained expert",
    "lora_rank": "rank of the LoRA",
    "lora_alpha": "alpha of the LoRA",
    "learning_rate": "learning rate",
    "sample_n_frames": "frames",
    "height": "height",
    "width": "width",
    "base_lora_path": "LoRA merged into the base model first",
    "low_noise_base_lora_path": "LoRA merged into the low-noise expert first",
    "seed": "seed",
}


def write_card(
    folder: Path,
    *,
    name: str,
    is_lora: bool,
    license: License | None,
    lines: Sequence[str],
    settings: Mapping[str, Any],
    checkpoint: Path | None,
) -> None:
    """Write README.md into ``folder``.

    Args:
        name: Title of the card.
        license: The license of the base model, which covers the trained model, too; None if unknown.
        lines: How programs load the files, without paths of this machine.
        settings: Those of the run, by flag; {} if the files are of another program.
        checkpoint: Its folder in the run, if there is one: the metrics of its iteration are shown.
    """
    from huggingface_hub import ModelCard, ModelCardData

    version = version_defaults(settings.get("transformer_version"))
    metrics = _metrics(checkpoint, settings) if checkpoint else []
    task = _TASKS.get(version.task or "", "text-to-video")
    tags = ["video", "reinforcement-learning", *(["lora"] if is_lora else [])]
    data = ModelCardData(
        base_model=version.repository or None,
        base_model_relation="adapter" if is_lora else "finetune",
        library_name="diffusers",
        license=license.name if license else None,
        license_name=license.title if license and license.name == "other" else None,
        license_link=(license.link or None) if license and license.name == "other" else None,
        pipeline_tag=task,
        tags=tags,
    )
    base = version.repository or settings.get("transformer_version") or "a base model"
    kind = "LoRA for" if is_lora else "Fine-tuned model of"
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name}", f"{kind} {_link(base)}, {task}."]
    if lines:
        parts += ["## Use", "```python\n" + "\n".join(map(_as_comment, lines)) + "\n```"]
    if settings:
        hidden = [] if version.boundary else ["expert"]
        hidden += [] if settings.get("lora_rank") else ["lora_rank", "lora_alpha"]
        rows = [
            (title, _text(settings.get(key))) for key, title in _SHOWN.items() if key not in hidden
        ]
        iteration = [("iterations", str(int(checkpoint.name)))] if _has_number(checkpoint) else []
        parts += ["## Training", _table(["", ""], [*iteration, *(row for row in rows if row[1])])]
    if metrics:
        parts += ["## Metrics", *metrics]
    if license:
        text = f"The license of the base model covers this model, too: {license.title}"
        parts += ["## License", f"{text} ({license.link})." if license.link else f"{text}."]
    ModelCard("\n\n".join(parts) + "\n", ignore_metadata_errors=False).save(folder / "README.md")


def copy_license(root: Path, folder: Path) -> list[str]:
    """Copy the texts of a license that lie in the base model's folder, and return their names."""
    found = []
    for file in sorted(root.iterdir()) if root.is_dir() else []:
        if file.is_file() and _LICENSE_FILE.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)
            found.append(file.name)
    return found


def _has_number(checkpoint: Path | None) -> bool:
    return checkpoint is not None and checkpoint.name.isdecimal()


def _metrics(checkpoint: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the validation of the checkpoint's iteration, or of the last one before it, beside that of
    the base model.
    """
    samples = checkpoint.resolve().parent.parent / "samples"
    if not _has_number(checkpoint) or not samples.is_dir():
        return []
    validated = sorted(
        folder
        for folder in samples.iterdir()
        if folder.name.isdecimal()
        and int(folder.name) <= int(checkpoint.name)
        and (folder / "measures.json").is_file()
    )
    if not validated:
        return []
    after = read_json(validated[-1] / "measures.json", "metrics")
    before = {}
    if len(validated) > 1 and int(validated[0].name) == 0:
        before = read_json(validated[0] / "measures.json", "metrics")
    iteration = int(validated[-1].name)
    heads = ["", *(["base model"] if before else []), f"iteration {iteration}"]
    names = ["reward", *(name for name in after if name not in ("reward", *_NOT_SHOWN))]
    rows = [
        [name, *(_value(each, name) for each in (before, after) if each)]
        for name in names
        if isinstance(after.get(name), int | float)
    ]
    _, num_videos = after.get("spreads", {}).get("reward", (None, "the"))
    sentence = (
        f"Means over {num_videos} validation videos, validation seed "
        f"{settings.get('validation_seed')}; ± is the standard deviation over the videos. This is "
        f"one run, with seed {settings.get('seed')}, which does not show how much the result varies "
        "between runs."
    )
    return [sentence, _table(heads, rows)]


def _value(measures: Mapping[str, Any], name: str) -> str:
    if name not in measures:
        return ""
    text = f"{measures[name]:.3f}"
    return f"{text} ± {measures['reward_std']:.3f}" if name == "reward" else text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: Any) -> str:
    """Return a setting's value; of a path, only the last part, which says nothing about a machine."""
    if value in (None, "", []):
        return ""
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return json.dumps(value)
    text = str(value)
    return Path(text).name if "/" in text else text.replace("|", "\\|")


def _link(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if "/" in base else base


def _as_comment(line: str) -> str:
    """Return a line of the export as code: what is no call is a comment."""
    match = _CALL.fullmatch(line)
    if not match:
        return f"# {line}"
    return f"# {match['place']}\n{match['call']}" if match["place"] else match["call"]
