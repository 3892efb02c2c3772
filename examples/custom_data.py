"""A custom objective with settings and data of its own: supervised fine-tuning on a folder of videos
with their captions in text files, for ``--objective``; see docs/extend.md#add-an-objective.

    python post_train.py --config configs/miniature_sft.yaml --output_dir outputs/captioned \
        --objective examples/custom_data.py:Captioned --captioned_folders videos
"""

from pathlib import Path
from typing import ClassVar

from hyvideo.data.examples import Example, Examples
from hyvideo.data.prompts import Request
from hyvideo.settings.sections import Section, learning
from hyvideo.training.objectives.sft import SFT


class Settings(Section):
    """Settings that only this objective has, beside those of sft."""

    videos_from: ClassVar[str] = "captioned_folders"  # in place of videos_csv

    captioned_folders: list[str] = learning(
        [],
        "Folders of videos; the prompt of NAME.mp4 is the text of NAME.txt.",
        is_path=True,
    )

    def read_videos(self, seed: int) -> Examples:
        """Return a training example for each video that has a caption."""
        examples = []
        for folder in map(Path, self.captioned_folders):
            for caption in sorted(folder.glob("*.txt")):
                prompt = caption.read_text(encoding="utf-8").strip()
                video = caption.with_suffix(".mp4")
                if not prompt or not video.is_file():
                    raise ValueError(f"captioned_folders needs {video} and a text in {caption}")
                examples.append(Example(Request(prompt), (video,), str(caption)))
        if not examples:
            raise ValueError(f"captioned_folders has no captions: {self.captioned_folders}")
        return Examples(examples)


class Captioned(SFT):
    """The loss of ``objective sft`` on these videos."""

    Settings = Settings
