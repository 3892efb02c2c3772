"""Videos of several policies for the same prompts and seeds, like figures 6 and 10 to 12 of the paper.

<out>/<policy>/0000.mp4, 0000.json    videos of each policy, as written by generate.py
<out>/policies.png                    a row for each prompt with frames of each policy
"""

import re
from dataclasses import dataclass
from pathlib import Path

from hyvideo.config.settings import Config
from hyvideo.data.outside import path_problem, quote
from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_video
from hyvideo.distributed.checkpoint import complete
from hyvideo.evaluation.generation import Source, generate, list_videos
from hyvideo.models.lora import LORA_FILES
from hyvideo.records.contact_sheet import contact_sheet, even_frames

BASE, SHEET = "base", "policies.png"


def read_policies(words: list[str]) -> dict[str, Source]:
    """Parse policies given as ``base`` or ``name=path`` (see `source_of`). Raises ValueError for invalid words."""
    policies: dict[str, Source] = {}
    for word in words:
        name, has_path, path = word.partition("=")
        if not has_path and name != BASE:
            raise ValueError(f"a policy must be `{BASE}` or `name=path`, got {quote(word)}")
        if name in policies:
            raise ValueError(f"policies need different names, got {quote(name)} twice")
        if not re.fullmatch(r"\w[\w.+-]{0,39}", name):
            raise ValueError(f"a policy's name must be at most 40 letters, digits and _ . + -, got {quote(name)}")
        policies[name] = source_of(Path(path)) if has_path else Source()
    return policies


def source_of(path: Path) -> Source:
    """Return the policy of a LoRA file or folder, of a checkpoint, or of a run (its newest checkpoint)."""
    if problem := path_problem(path) or (None if path.exists() else "it does not exist"):
        raise ValueError(f"a policy must be a run's folder, a checkpoint or a LoRA, got {quote(path)}: {problem}")
    if path.is_file() or any((path / name).is_file() for name in LORA_FILES):
        return Source(lora=path)
    checkpoints = complete(path)
    return Source(checkpoints[-1] if checkpoints else path)


@dataclass(frozen=True)
class PolicyComparison:
    """Videos of several policies, sampled as in validation, but with the noise of generate.py."""

    config: Config
    policies: dict[str, Source]
    requests: list[Request]
    out: Path

    def check(self) -> None:
        """Raise ValueError for a policy that does not fit the model, before any weights are read."""
        for source in self.policies.values():
            source.check(self.config.model, self.config.negative_requests)

    def make(self) -> None:
        """Generate the videos of one policy after the other; the processes of torchrun share them."""
        config = self.config.sampled_as_validation()
        sizes = dict.fromkeys(self.requests, (config.data.height, config.data.width))
        for name, source in self.policies.items():
            videos = list_videos(sizes, self.requests, self.out / name)
            generate(config, videos, source=source, seed=config.record.validation_seed, is_stochastic=False)

    def draw(self) -> Path:
        """Write the contact sheet and return its path."""
        frames: dict[str, list] = {name: [] for name in self.policies}
        captions = []
        for number in range(len(self.requests)):
            file = f"{number:04d}.mp4"
            for name in self.policies:
                frames[name].append(even_frames(read_video(self.out / name / file)[0]))
            captions.append(f"seed {self.config.record.validation_seed}, video {number}")
        contact_sheet(self.out / SHEET, [request.prompt for request in self.requests], frames, captions)
        return self.out / SHEET
