"""Settings of objective sft."""

from hyvideo.data.examples import Examples, read_examples
from hyvideo.settings.objectives.base import GivenVideosSettings
from hyvideo.settings.sections import learning


class SFTSettings(GivenVideosSettings):
    """Supervised fine-tuning on videos in CSV files, without rollouts."""

    name = "sft"
    label = "fine-tuning"
    sentence = "videos in videos_csv, without rollouts"
    class_path = "hyvideo.training.objectives.sft:SFT"
    trains = "levels"
    videos_from = "videos_csv"
    needs_rewards = False
    group_size = 1
    checks_velocities = True

    videos_csv: list[str] = learning(
        [],
        "Videos to train on, folders of videos with captions or of scripts.rate, or tables: "
        "`prompt`, `video`, optionally `ref_image_path`, `ref_last_image_path`, `keep` (1 or 0), "
        "`score`.",
        is_path=True,
    )
    keep_fraction: float = learning(
        1.0,
        "Share of each prompt's videos that is trained on, those with the highest `score`.",
        gt=0,
        le=1,
    )
    nft_levels: int = learning(1, "Noise levels that are trained per video.", ge=1)

    def read_videos(self, seed: int) -> Examples:
        return Examples(read_examples(self.videos_csv, self.keep_fraction))

    @property
    def method(self) -> str:
        return f"keep_fraction {self.keep_fraction:g}"
