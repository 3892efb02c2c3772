"""Finished rollouts of the round that is being made, on disk until it is trained: a restart does not make them again.

    spool/<key>/rollouts-<replica>-<batch>.safetensors    latents, means and log-probabilities
    spool/<key>/rewards-<rank>-<batch>.json               what the scorers said of the videos that a rank has

The key stands for everything that a rollout depends on: settings, prompts, iteration, layout, and the policy's weights
themselves. Another policy, or another setting, never finds them.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hyvideo.config.sections import RecordSettings
from hyvideo.config.settings import Config
from hyvideo.distributed.collectives import everywhere, gather_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import local
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Trajectories

FOLDER = "spool"
# What a rollout or its reward does not depend on.
_IRRELEVANT = frozenset(field.name for field in dataclasses.fields(RecordSettings)) | {"max_steps", "num_threads"}


class Spool:
    """That of one iteration on this rank. All ranks use it in the same order.

    Args:
        trained: The policy's trained parameters by name.
        contents: Hashes of the files that settings name.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        iteration: int,
        trained: Mapping[str, Tensor],
        device: torch.device,
        contents: Mapping[str, str],
    ):
        self.mesh, self.device = mesh, device
        self.num_rounds = 0
        self.root = Path(config.record.output_dir) / FOLDER
        self.folder = self.root / _key(config, mesh, iteration, trained, contents) if self.num_rounds else self.root

    def rollout(self, batch: int) -> Trajectories | None:
        """A batch's rollouts, if every rank finds its own."""
        if not self.num_rounds:
            return None
        try:
            found = Trajectories(
                **{name: tensor.to(self.device) for name, tensor in _read(self._rollouts_of(batch)).items()}
            )
        except (OSError, SafetensorError, TypeError, ValueError):
            found = None
        return found if everywhere(found is not None, self.mesh) else None

    def keep_rollout(self, batch: int, rollout: Trajectories) -> None:
        """The first of the ranks that share it writes."""
        if self.num_rounds and self.mesh.sp_rank == 0:
            tensors = {name: getattr(rollout, name).contiguous().cpu() for name in ("latents", "means", "log_probs")}
            metadata = {"blake2b": _digest(tensors)}
            self._keep(self._rollouts_of(batch), lambda path: save_file(tensors, path, metadata))

    def rewards(self, batch: int) -> list[Reward] | None:
        """Of the videos that this rank has of a batch."""
        try:
            entries = json.loads(self._rewards_of(batch).read_text()) if self.num_rounds else None
            return None if entries is None else [Reward(e["total"], e["scores"], e["reason"]) for e in entries]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep_rewards(self, batch: int, rewards: list[Reward]) -> None:
        """A missing reward is not kept: the scorer may have an answer next time."""
        if self.num_rounds and not any(reward.is_missing for reward in rewards):
            entries = [{"total": r.total, "scores": r.scores, "reason": r.reason} for r in rewards]
            text = json.dumps(entries, default=float)  # numpy's numbers too
            self._keep(self._rewards_of(batch), lambda path: path.write_text(text))

    def forget(self) -> None:
        """The round is trained: of it and those before it the newest ``spool_rounds - 1`` are left.

        Later ones, of a run that was killed further on, are met again.
        """
        if self.num_rounds and self.mesh.is_main:
            folders = sorted(path for path in self.root.glob("[0-9]*") if path.name[:6] <= self.folder.name[:6])
            for folder in folders[::-1][self.num_rounds - 1 :]:
                shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, path: Path, write: Callable[[Path], object]) -> None:
        """Whole or not at all. What cannot be written is told, and costs the time to make it again after a restart."""
        aside = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(aside)
            os.replace(aside, path)
        except (OSError, SafetensorError) as error:
            print(f"\nROLLOUTS NOT SPOOLED ({error}); training goes on", file=sys.stderr, flush=True)
            with suppress(OSError):
                aside.unlink()

    def _rollouts_of(self, batch: int) -> Path:
        return self.folder / f"rollouts-{self.mesh.replica:04d}-{batch:04d}.safetensors"

    def _rewards_of(self, batch: int) -> Path:
        return self.folder / f"rewards-{self.mesh.rank:04d}-{batch:04d}.json"


def _read(path: Path) -> dict[str, Tensor]:
    """Raises ValueError where the tensors are not those that were written."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        written = (file.metadata() or {}).get("blake2b")
    if written != _digest(tensors):
        raise ValueError(f"{path} is not what was written")
    return tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(tensors[name].view(torch.uint8).numpy())
    return digest.hexdigest()


def _key(config: Config, mesh: Mesh, iteration: int, trained: Mapping[str, Tensor], contents: Mapping[str, str]) -> str:
    settings = {name: value for name, value in config.flat().items() if name not in _IRRELEVANT}
    own = torch.stack([_moments(local(parameter)) for parameter in trained.values()])
    digest = hashlib.blake2b(digest_size=12)
    described = [settings, dict(contents), iteration, mesh.world_size, mesh.sp_size]
    digest.update(json.dumps(described, sort_keys=True).encode())
    digest.update(own.cpu().numpy().tobytes())
    return (
        f"{iteration:06d}-{digest.hexdigest()}" if mesh.world_size == 1 else f"{iteration:06d}-{_common(digest, mesh)}"
    )


def _common(digest, mesh: Mesh) -> str:
    """One name for all ranks, of what each of them holds."""

    own = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    return hashlib.blake2b(gather_ranks(own, mesh).numpy().tobytes(), digest_size=12).hexdigest()


def _moments(part: Tensor) -> Tensor:
    """Two numbers that another policy does not have. Shape: (2,), float64."""
    if not part.numel():
        return torch.zeros(2, dtype=torch.float64, device=part.device)
    exact = part.detach().double()
    return torch.stack([exact.sum(), exact.square().sum()])
