"""The policy during training: the parallelized transformer, its trained parameters, optimizer,
anchor and EMA.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.checkpoints.format import is_checkpoint, verify
from hyvideo.checkpoints.loading import check_shapes, load_tensors, stored_shapes
from hyvideo.checkpoints.state import ANCHOR, AVERAGE, POLICY, optimizer_name
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.distributed.collectives import raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize, prepare_backward
from hyvideo.distributed.sharded_tensors import copy_full, fill_shards, full_tensor, reshard
from hyvideo.loading import saved_policy
from hyvideo.loading.model_setup import (
    adapter_config,
    read_initial_lora,
    stream_expert,
)
from hyvideo.loading.run_settings import check_trained_expert
from hyvideo.models import loading
from hyvideo.models.family import family_of
from hyvideo.models.lora import Lora, add_trainable_lora, current_lora, differences_of, pairs_of
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import DTYPES
from hyvideo.settings.config import Config
from hyvideo.training.anchor import Anchor, WeightCopy
from hyvideo.training.optimizers import make_optimizers


class Policy:
    """The transformer and its trained parameters; parameters that no condition of ``requests`` uses
    are frozen.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, requests: list[Request]):
        self.config, self.mesh = config, mesh
        self.is_sharded = config.distributed.enable_fsdp and mesh.world_size > 1
        self.is_lora = config.optimizer.lora_rank > 0
        start = read_initial_lora(config.model, config.optimizer)
        # of the base weights, for the checkpoints of a LoRA
        self.differences = differences_of(start or {})
        self.transformer = self._load(device, requests, start)
        self.trained: dict[str, nn.Parameter] = {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }
        hidden = family_of(self.transformer).target_modules
        self.optimizers = make_optimizers(
            config.optimizer, self.trained, DTYPES[config.model.dtype], hidden=hidden
        )
        self._syncs_only_last = self.is_lora
        offload = config.placements.copies == Placement.CPU
        self.anchor: Anchor | None = None
        if config.objective.needs_anchor:
            refresh_every = (
                config.objective.update_ref_model_step if config.objective.anchor_moves else None
            )
            self.anchor = Anchor(
                self.transformer,
                self.trained,
                refresh_every=refresh_every,
                offload=offload,
                has_own_guidance=config.anchor_has_own_guidance,
                is_given=bool(config.objective.anchor_path),
            )
        if self.anchor is not None and self.anchor.is_given:
            self._load_anchor(Path(config.objective.anchor_path))
        self.ema: WeightCopy | None = None
        if config.optimizer.ema_decay:
            self.ema = WeightCopy(self.transformer, self.trained, offload=offload)

    def _load(self, device: torch.device, requests: list[Request], start: Lora | None) -> nn.Module:
        """Load the transformer on this rank and prepare it for training from the LoRA ``start``."""
        model = self.config.model
        distributed = self.config.distributed
        optimizer = self.config.optimizer
        expert = self.config.trained_expert
        folder = loading.transformer_folder(
            model.pretrained_model_root, model.transformer_version, expert
        )
        transformer, weights = stream_expert(
            model,
            expert,
            loading.read_family(folder).kinds(requests),
            # Frozen weights need only the precision of the computation.
            dtype=DTYPES[model.dtype if self.is_lora else "fp32"],
            device=device,
            weight_dtype=model.base_weight_dtype,
            read=self.mesh.is_main,  # the other ranks receive the weights
            loras=[self.differences if self.is_lora else start or {}],
        )
        if self.is_lora:
            add_trainable_lora(transformer, adapter_config(transformer, optimizer, start))
        parallelize(
            transformer,
            self.mesh,
            recompute=distributed.activation_checkpointing,
            compile=distributed.enable_compile == "true",
            shard=self.is_sharded,
            reshard_after_forward=distributed.reshard_after_forward,
            compute_dtype=DTYPES[model.dtype],
        )
        with raise_on_all_ranks(self.mesh):
            fill_shards(transformer, weights, device=device)
        if self.is_lora:
            _fill_adapter(transformer, start, self.config.data.seed)
        # on a CPU, nothing would be saved
        if self.is_lora and not self.is_sharded and device.type == "cuda":
            transformer.modulation_cache = family_of(transformer).cache_modulation(transformer)
        return transformer

    def _load_anchor(self, path: Path) -> None:
        """Load the anchor from a checkpoint of a run, or from a LoRA.

        Raises ValueError, on all ranks, if it differs.

        It must have the trained parameters of this run: all weights, or an adapter of the same rank
        and modules.
        """
        with raise_on_all_ranks(self.mesh):
            if self.mesh.is_main:
                verify(path)
            if not is_checkpoint(path):
                adapter = self._fitting_lora(path)
            else:
                check_trained_expert(path, self.config.trained_expert)
                if self.is_lora:
                    self._check_differences(saved_policy.read_saved_lora(path), path)
                stored = saved_policy.stored_names(self.trained, path)
                check_shapes(path, {stored[name]: each for name, each in self.trained.items()})
        if not is_checkpoint(path):
            with self.anchor.swapped_in():
                _fill_adapter(self.transformer, adapter, self.config.data.seed)
            return
        loaded = {name: torch.zeros_like(parameter) for name, parameter in self.trained.items()}
        load_tensors(path, {stored[name]: tensor for name, tensor in loaded.items()}, self.mesh)
        self.anchor.load(loaded)

    def _fitting_lora(self, path: Path) -> Lora:
        """Return the LoRA of a file for the anchor.

        Raises ValueError unless it has the modules and rank of ours.
        """
        if not self.is_lora:
            raise ValueError(
                "anchor_path must be a checkpoint with all weights if lora_rank is 0, got the LoRA "
                f"{path}; merge it with scripts.export, train from the result and set anchor_path "
                "to a checkpoint, or set lora_rank"
            )
        read = saved_policy.read_saved_lora(
            path,
            self.config.trained_expert,
            ignore_expert=self.config.model.ignore_lora_expert,
        )
        lora = pairs_of(read)
        config = self.transformer.peft_config["default"]
        trained = {name.partition(".lora_")[0] for name in self.trained}
        found = {(pair.rank, pair.alpha) for pair in lora.values()}
        if lora.keys() != trained or found != {(config.r, config.lora_alpha)}:
            raise ValueError(
                "anchor_path must be a LoRA with the modules, rank and alpha of this run, got "
                f"{path} with {len(lora)} modules and {sorted(found)} instead of {len(trained)} "
                f"and {(config.r, config.lora_alpha)}; set lora_rank, lora_alpha and "
                "lora_target_modules to those of the file"
            )
        self._check_differences(read, path)
        return read

    def _check_differences(self, lora: Lora, path: Path) -> None:
        """Raise ValueError unless a LoRA changes the same whole parameters as the LoRA that this run
        starts from.
        """
        found = differences_of(lora)
        is_same = found.keys() == self.differences.keys() and all(
            torch.equal(found[name].tensor, self.differences[name].tensor) for name in found
        )
        if not is_same:
            raise ValueError(
                "anchor_path must be a LoRA of the same base model as this run: it changes "
                f"{len(found)} norms, biases or other whole parameters, this run "
                f"{len(self.differences)}, got {path}; set pretrained_lora_path to the file that "
                "has these changes"
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.trained.values())

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare the reduction of gradients for a backward pass, the last or another one of an
        update.
        """
        prepare_backward(self.transformer, is_last=is_last, only_last=self._syncs_only_last)

    def after_update(self) -> None:
        """Update the EMA and the anchor's age after an optimizer update."""
        if self.ema:
            self.ema.move_towards(1 - self.config.optimizer.ema_decay)
        if self.anchor:
            self.anchor.age += 1

    def with_ema_weights(self) -> AbstractContextManager:
        """Return a context in which the model uses the EMA weights, if the run has them."""
        return self.ema.swapped_in() if self.ema else nullcontext()

    def lora(self) -> Lora | None:
        """Return the current adapter, gathered on the CPU; None in full training.

        All ranks must call this.
        """
        if not self.is_lora:
            return None
        reshard(self.transformer)  # weights gathered by a forward pass have its lower precision
        return current_lora(self.transformer, gather=full_tensor) | self.differences

    # --- checkpoints ------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name; see `checkpoints.state`."""
        tensors = self._policy_tensors()
        for name, parameter in self.trained.items():
            for key, value in self.optimizers.state_of(parameter).items():
                tensors[optimizer_name(name, key)] = value
        for kind, copy in self._copies(self.anchor and self.anchor.age).items():
            tensors |= {f"{kind}.{name}": tensor for name, tensor in copy.tensors().items()}
        return tensors

    def load(self, folder: Path, anchor_age: int, *, replaces_anchor: bool = False) -> None:
        """Load a checkpoint, written by any number of ranks.

        With ``replaces_anchor``, the anchor keeps the weights that it started with, those of
        ``anchor_path`` or of the base model, instead of the anchor in the checkpoint. Raises
        ValueError if the checkpoint does not fit.
        """
        policy = self._policy_tensors()
        # otherwise the other ranks would wait for this one in the next collective
        with raise_on_all_ranks(self.mesh):
            optimizer = dict(self._optimizer_targets(folder))
        copies = self._copies(0 if replaces_anchor else anchor_age)
        saved = {
            kind: {name: torch.zeros_like(p) for name, p in self.trained.items()} for kind in copies
        }
        copied = {
            f"{kind}.{name}": tensor
            for kind, tensors in saved.items()
            for name, tensor in tensors.items()
        }
        load_tensors(folder, policy | optimizer | copied, self.mesh)
        for name, parameter in self.trained.items():
            prefix = optimizer_name(name)
            state = {
                key.removeprefix(prefix): value
                for key, value in optimizer.items()
                if key.startswith(prefix)
            }
            if state:
                self.optimizers.restore(parameter, state)
        for kind, copy in copies.items():
            copy.load(saved[kind])
        if self.anchor and replaces_anchor:
            self.anchor.age = max(1, anchor_age)  # at age 0, the next checkpoint would not have it
        elif self.anchor:
            self.anchor.age = anchor_age
            if not anchor_age and not self.anchor.is_given:
                self.anchor.refresh()

    def _copies(self, anchor_age: int | None) -> dict[str, WeightCopy]:
        """Return the weight copies by name in a checkpoint; an anchor of age 0 equals the policy
        and is not stored.
        """
        anchor = {ANCHOR: self.anchor} if self.anchor and anchor_age else {}
        return anchor | ({AVERAGE: self.ema} if self.ema else {})

    def _policy_tensors(self) -> dict[str, Tensor]:
        """Return the adapter's weights or, in full training, all weights, by their names in a
        checkpoint.
        """
        tensors = self.trained if self.is_lora else self.transformer.state_dict()
        return {f"{POLICY}.{name}": tensor.detach() for name, tensor in tensors.items()}

    def _optimizer_targets(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        shapes = stored_shapes(folder)
        by_name = {optimizer_name(name): parameter for name, parameter in self.trained.items()}
        for key, stored in shapes.items():
            shape, dtype = tuple(stored.size), stored.properties.dtype
            parameter = by_name.get(key.rpartition(".")[0] + ".")
            if parameter is not None and shape == tuple(parameter.shape):
                yield key, torch.zeros_like(parameter, dtype=dtype)
            elif parameter is not None:
                yield key, torch.zeros(shape, dtype=dtype, device=parameter.device)


@torch.no_grad()
def _fill_adapter(transformer: nn.Module, start: Lora | None, seed: int) -> None:
    """Initialize an adapter from ``start``, or with random A (of peft's default variance) and B =
    0, without effect.
    """
    for name, parameter in transformer.named_parameters():
        module, _, factor = name.partition(".lora_")
        if factor and start:
            copy_full(parameter, start[module].a if factor.startswith("A.") else start[module].b)
        elif factor.startswith("B."):
            parameter.zero_()
        elif factor:
            drawn = normal(tuple(parameter.shape), seed, "adapter", name)
            copy_full(parameter, drawn / (3 * parameter.shape[1]) ** 0.5)
