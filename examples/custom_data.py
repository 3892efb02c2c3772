"""A custom objective with settings and data of its own: supervised fine-tuning on folders of videos
whose name is their prompt, for ``--objective``; see docs/extend.md#add-an-objective.

    python post_train.py --config configs/miniature_sft.yaml --output_dir outputs/folders \
        --objective examples/custom_data.py:PromptFolders --prompt_folders "videos/a red circle moves up"

Captions in text files need no objective of their own, because ``--videos_csv`` reads them.
"""

from pathlib import Path
from typing import ClassVar

from hyvideo.data.examples import Example, Examples
from hyvideo.data.prompts import Request
from hyvideo.files.tables import videos_in
from hyvideo.settings.sections import Section, learning
from hyvideo.training.objectives.sft import SFT


class Settings(Section):
    """Settings that only this objective has, beside those of sft."""

    videos_from: ClassVar[str] = "prompt_folders"  # in place of videos_csv

    prompt_folders: list[str] = learning(
        [], "Folders of videos; the name of a folder is the prompt of its videos.", is_path=True
    )

    def read_videos(self, seed: int) -> Examples:
        """Return a training example for each video."""
        examples = [
            Example(Request(folder.absolute().name), (video,), str(video))
            for folder in map(Path, self.prompt_folders)
            for video in videos_in(folder)
        ]
        if not examples:
            raise ValueError(f"prompt_folders must have videos, got none in {self.prompt_folders}")
        return Examples(examples)


class PromptFolders(SFT):
    """The loss of ``objective sft`` on these videos."""

    Settings = Settings
