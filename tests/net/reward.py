"""A custom reward that fails for some videos on rank 1: the missing rewards of a case on two
ranks.
"""

import os


class Red:
    dimensions = ("red",)

    def score(self, videos, prompts, *, fps):
        rows = [{"red": video[:, 0].float().mean().item() / 255} for video in videos]
        if os.environ.get("RANK") == "1":
            for row, prompt, video in zip(rows, prompts, videos):
                # the check before the run uses another prompt
                if "triangle" in prompt and int(video.sum()) % 2 == 0:
                    row["red"] = float("nan")
        return rows

    def check_prompts(self, prompts):
        pass

    def held_out(self, videos, prompts):
        return {}

    def held_out_each(self, videos, prompts):
        return [{} for _ in videos]
