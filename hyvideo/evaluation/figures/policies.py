"""The same prompts and seeds under several policies: figures 6 and 10 to 12 of the paper.

<out>/<policy>/0000.mp4, 0000.json    what each makes of the prompts, as generate.py writes it
<out>/side_by_side/0000.mp4           all of them beside each other, under their names
<out>/policies.png                    a row for each prompt, frames of each policy
"""

import re
from dataclasses import dataclass
from pathlib import Path

from hyvideo.config.settings import Config
from hyvideo.data.outside import shown, unusable
from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_video, write_video
from hyvideo.distributed.checkpoint import complete
from hyvideo.evaluation.generation import Source, generate, list_videos
from hyvideo.models.lora import LORA_FILES
from hyvideo.records.contact_sheet import contact_sheet, even_frames
from hyvideo.records.side_by_side import side_by_side

BASE, TOGETHER, SHEET = "base", "side_by_side", "policies.png"


def read_policies(words: list[str]) -> dict[str, Source]:
    """Policies by name, from ``base`` or ``name=path``; `source_of` says what a path may be. ValueError for others."""
    policies: dict[str, Source] = {}
    for word in words:
        name, has_path, path = word.partition("=")
        if not has_path and name != BASE:
            raise ValueError(f"a policy is `{BASE}` or `name=path`, got {shown(word)}")
        if name in (*policies, TOGETHER):
            raise ValueError(f"policies need names of their own, got {shown(name)} a second time, or as our folder's")
        if not re.fullmatch(r"\w[\w.+-]{0,39}", name):
            raise ValueError(f"a policy's name has at most 40 letters, digits and _ . + -, got {shown(name)}")
        policies[name] = source_of(Path(path)) if has_path else Source()
    return policies


def source_of(path: Path) -> Source:
    """The policy of a LoRA's file or folder, of a checkpoint, or of a run's folder: its newest checkpoint."""
    if problem := unusable(path) or (None if path.exists() else "it is not there"):
        raise ValueError(f"a policy is a run's folder, a checkpoint or a LoRA, got {shown(path)}: {problem}")
    if path.is_file() or any((path / name).is_file() for name in LORA_FILES):
        return Source(lora=path)
    checkpoints = complete(path)
    return Source(checkpoints[-1] if checkpoints else path)


@dataclass(frozen=True)
class PolicyComparison:
    """Videos of some prompts by several policies, as validation samples them but for the noise, which is generate's."""

    config: Config
    policies: dict[str, Source]
    requests: list[Request]
    out: Path

    def check(self) -> None:
        """Raises ValueError for a policy that is not of the model, before any weights are read."""
        for source in self.policies.values():
            source.check(self.config.model, self.config.negative_requests)

    def make(self) -> None:
        """Makes the videos of one policy after the other; several processes of torchrun share them."""
        config = self.config.sampled_as_validation()
        sizes = dict.fromkeys(self.requests, (config.data.height, config.data.width))
        for name, source in self.policies.items():
            videos = list_videos(sizes, self.requests, self.out / name)
            generate(config, videos, source=source, seed=config.record.validation_seed, is_stochastic=False)

    def draw(self) -> list[Path]:
        """Writes the sheet and the mp4 files of all policies beside each other; gives their paths."""
        sheet, together = self.out / SHEET, self.out / TOGETHER
        together.mkdir(exist_ok=True)
        frames: dict[str, list] = {name: [] for name in self.policies}
        captions = []
        for number in range(len(self.requests)):
            file = f"{number:04d}.mp4"
            clips = {name: read_video(self.out / name / file)[0] for name in self.policies}
            write_video(together / file, side_by_side(clips), self.config.data.fps)
            for name, clip in clips.items():
                frames[name].append(even_frames(clip))
            captions.append(f"seed {self.config.record.validation_seed}, video {number}")
        contact_sheet(sheet, [request.prompt for request in self.requests], frames, captions)
        return [sheet, together]
