"""Videos of the same prompts and seeds, sampled without noise: how far the policy has come."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.data.prompts import read_requests
from hyvideo.data.randomness import normal
from hyvideo.data.videos import read_video
from hyvideo.distributed.collectives import gather_objects, merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking.held_out_metrics import measure_all
from hyvideo.evaluation.reward_hacking.monitor import HackingWatch, read_validation, write_validation
from hyvideo.evaluation.reward_hacking.rule import Dispersion, ValidationStats
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.conditions import Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.records.contact_sheet import before_after
from hyvideo.records.run_files import evenly_spaced, score_entry, told_if_unwritable, write_json, write_videos

FOLDER = "samples"
DIMENSIONS = ("VQ", "MQ", "TA")


class Validation:
    """Samples, scores and records the validation set. The replicas share the videos.

    Measures of a whole set, as a Frechet distance, are taken over the videos of the main rank; all others over all.

    Args:
        on_stage: Is told ``validation`` before each batch.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: HunyuanVideoGRPOPipeline,
        encoder: ConditionEncoder,
        judge: AsyncScorer,
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        self.on_stage = on_stage
        self.config, self.mesh, self.judge, self.encoder = config, mesh, judge, encoder
        self.pipeline = pipeline.with_steps(config.record.validation_steps)
        requests = read_requests(config.data.valid_video_csv)
        self.requests = [request for request in requests for _ in range(config.record.validation_repeats)]
        self.prompts = [request.prompt for request in self.requests]
        self.output = Path(config.record.output_dir) / FOLDER
        self.height = config.record.validation_height or config.data.height
        self.width = config.record.validation_width or config.data.width
        self.latent_shape = self.pipeline.latent_shape(config.data.sample_n_frames, self.height, self.width)
        asked = [[request.prompt, request.image and Path(request.image).name] for request in requests]
        self.made_with = {
            "prompts": hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest(),
            "steps": config.record.validation_steps,
            "seed": config.record.validation_seed,
            "repeats": config.record.validation_repeats,
            "size": [self.height, self.width],
        }
        self.watch = HackingWatch(
            config.record.on_reward_hacking, config.record.hacking_threshold, mesh, self.output, self.made_with
        )

    def run(self, iteration: int) -> dict[str, float]:
        """Validates the policy as of ``iteration``, writes samples/<iteration>/ and gives ``validation/...``."""
        videos = self.videos(self.rows())
        prompts = [self.prompts[row] for row in videos]
        scored = self.judge.score(list(videos.values()), prompts, fps=self.config.data.fps)
        own = dict(zip(videos, scored))
        rewards = self._gather(own)
        groups = [row // self.config.record.validation_repeats for row in range(len(self.prompts))]
        means, spreads = measure_all(videos, own, self.prompts, groups, self.judge, self.mesh)
        measures = means | summarise(rewards) | self._held_out(list(videos.values()), prompts)
        seen = ValidationStats(iteration, measures, spreads | spread_of_reward(rewards))
        hacking = self.watch.look(seen)
        names = self._keep(iteration, videos)
        with told_if_unwritable(f"VALIDATION {self.folder(iteration)}"):
            if self.mesh.is_main:
                self._record(iteration, rewards, names)
                write_validation(self.folder(iteration), seen, self.watch.shifts, self.made_with)
        return {f"validation/{name}": value for name, value in measures.items()} | {"validation/hacking": hacking}

    def folder(self, iteration: int) -> Path:
        return self.output / f"{iteration:06d}"

    def has(self, iteration: int) -> bool:
        """Claims that the policy of ``iteration`` was validated in this folder, with the prompts and steps of now."""
        return read_validation(self.folder(iteration), self.made_with) is not None

    def measures(self, iteration: int) -> dict[str, float]:
        """The measures of an earlier validation, as recorded; NaN where nothing could be measured."""
        recorded = read_validation(self.folder(iteration), self.made_with)
        return dict(recorded.means) if recorded else {}

    def picture(self, iteration: int) -> Path | None:
        """Writes before_after.png: the recorded videos of the base policy beside those of ``iteration``."""
        pairs = [self._recorded(0), self._recorded(iteration)]
        both = pairs[0].keys() & pairs[1].keys()
        files = sorted(name for name in both if all((self.folder(k) / name).is_file() for k in (0, iteration)))
        if not files:
            return None
        before, after = ([read_video(self.folder(k) / name)[0] for name in files] for k in (0, iteration))
        entries = [(pairs[0][name], pairs[1][name]) for name in files]
        path = self.output.parent / "before_after.png"
        before_after(
            path,
            [old["prompt"] for old, _ in entries],
            before,
            after,
            captions=[f"{_shown(old['reward'])} -> {_shown(new['reward'])}" for old, new in entries],
        )
        return path

    def rows(self) -> list[int]:
        """This replica's videos; the last ones may be done twice so that all replicas do the same work."""
        count = -(-len(self.prompts) // self.mesh.num_replicas)
        last = len(self.prompts) - 1
        return [min(self.mesh.replica + i * self.mesh.num_replicas, last) for i in range(count)]

    def videos(self, rows: list[int]) -> dict[int, Tensor | None]:
        """The videos that this rank decodes, by row; ranks that sample a batch together share its videos."""
        batch_size = self.config.record.validation_batch_size
        videos: dict[int, Tensor | None] = {}
        for start in range(0, len(rows), batch_size):
            self.on_stage("validation")
            part = rows[start : start + batch_size]
            conditions = self._conditions(part).to(self.pipeline.device)
            noise = torch.stack([self._noise(row) for row in part]).to(self.pipeline.device)
            latents = self.pipeline.sample_ode(conditions, noise)
            own = self.mesh.own_share(list(range(len(part))))
            if own:
                decoded = self.pipeline.decode(latents[own], batch_size=self.config.rollout.decode_batch_size)
                videos |= zip([part[i] for i in own], decoded)
        return videos

    def _conditions(self, rows: list[int]) -> Conditions:
        return self.encoder([self.requests[row] for row in rows], height=self.height, width=self.width)

    def _noise(self, row: int) -> Tensor:
        prompt, repeat = divmod(row, self.config.record.validation_repeats)
        return normal(self.latent_shape, self.config.record.validation_seed, "validation noise", prompt, repeat)

    def _held_out(self, videos: list[Tensor | None], prompts: list[str]) -> dict[str, float]:
        """Measures of the set of this rank's videos, and of how many they are."""
        seen = [(video, prompt) for video, prompt in zip(videos, prompts) if video is not None]
        measures = self.judge.held_out(*map(list, zip(*seen))) if seen else {}
        return measures | ({"held_out_videos": float(len(seen))} if measures else {})

    def _gather(self, rewards: dict[int, Reward]) -> list[Reward]:
        """The rewards of all validation videos, in their order, from those of each rank by row."""
        own = {
            row: [reward.total, *(reward.scores.get(name, math.nan) for name in DIMENSIONS)]
            for row, reward in rewards.items()
        }
        in_order = merge_rows(own, len(self.prompts), 1 + len(DIMENSIONS), self.mesh).tolist()
        return [Reward(total, dict(zip(DIMENSIONS, scores))) for total, *scores in in_order]

    def _keep(self, iteration: int, videos: dict[int, Tensor | None]) -> dict[int, str]:
        """Writes what is to be kept of this rank's videos; gives the main rank the names of all, by row."""
        wanted = evenly_spaced(self.config.record.log_num_videos, len(self.prompts))
        mine = [row for row in wanted if row % self.mesh.num_replicas == self.mesh.replica]  # one done twice kept once
        shown = {row: videos[row] for row in mine if videos.get(row) is not None}
        names: dict[int, str] = {}
        with told_if_unwritable(f"VIDEOS OF {self.folder(iteration)}"):
            names = write_videos(self.folder(iteration), shown, self.config.data.fps)
        everyone = gather_objects(names, self.mesh)
        return {row: name for part in everyone for row, name in part.items()}

    def _record(self, iteration: int, rewards: list[Reward], names: dict[int, str]) -> None:
        folder = self.folder(iteration)
        repeats = self.config.record.validation_repeats
        entries = [
            score_entry(
                self.prompts[row],
                self.config.record.validation_seed,
                row // repeats,
                reward,
                file=names.get(row),
                advantage=math.nan,
                number=row,
            )
            for row, reward in enumerate(rewards)
        ]
        write_json(folder / "scores.json", entries)

    def _recorded(self, iteration: int) -> dict[str, dict]:
        entries = json.loads((self.folder(iteration) / "scores.json").read_text())
        return {entry["file"]: entry for entry in entries if entry["file"]}


def summarise(rewards: list[Reward]) -> dict[str, float]:
    """Mean and spread over the videos that were scored, and how many were not."""
    scored = [reward for reward in rewards if not reward.is_missing]
    totals = [reward.total for reward in scored]
    means = {name: _mean([reward.scores.get(name, math.nan) for reward in scored]) for name in DIMENSIONS}
    return {
        "reward": _mean(totals),
        "reward_std": statistics.pstdev(totals) if totals else math.nan,
        **means,
        "overall": sum(means.values()),
        "missing": float(len(rewards) - len(scored)),
    }


def spread_of_reward(rewards: list[Reward]) -> dict[str, Dispersion]:
    """By its name; nothing where no video was scored."""
    totals = [reward.total for reward in rewards if not reward.is_missing]
    return {"reward": Dispersion(statistics.pstdev(totals), len(totals))} if totals else {}


def _mean(values: list[float]) -> float:
    """Of the numbers among the values; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:.2f}"
