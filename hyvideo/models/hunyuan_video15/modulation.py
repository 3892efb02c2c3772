"""Cached outputs of frozen modulation layers, whose matrices then stay in CPU memory.

The modulation of a block depends on the timestep alone. Its matrices are a third of the model's
parameters, 5.06 GiB in bf16, and each forward pass uses them for one vector per sample. If they and
the time embedding are frozen, as under a LoRA, their outputs for all timesteps of a rollout or an
update are computed in one pass over the matrices, which are copied to the GPU one after another. A
timestep's outputs take 2.5 MiB.

Outputs are computed for one timestep at a time, as in a forward pass of one sample, and are equal
to it to the bit.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from hyvideo.models.offload import device_of, on_device, put
from hyvideo.models.placement import Placement

# timestep of a sample and, for a MeanFlow model, the end of its step
Times = tuple[float, float | None]

# timesteps whose outputs are kept although `ModulationCache.prepare` did not name them
_MOST_UNPREPARED = 16


def cache_modulation(transformer: nn.Module) -> "ModulationCache | None":
    """Move the matrices to the CPU and return their cache; None if one of the layers is trained."""
    layers = [norm.linear for norm in _norms(transformer)]
    parameters = chain(
        transformer.time_embed.parameters(), *(layer.parameters() for layer in layers)
    )
    if any(parameter.requires_grad for parameter in parameters):
        return None
    return ModulationCache(transformer)


class ModulationCache:
    """Outputs of the modulation layers of all blocks, by timestep.

    Before each forward pass, `select` chooses the timesteps of its samples; the transformer then
    calls `take`.
    """

    def __init__(self, transformer: nn.Module):
        self.time_embed = transformer.time_embed
        self.norms = _norms(transformer)
        for norm in self.norms:
            put(norm.linear, Placement.CPU, device_of(norm.linear))
        self._outputs: dict[Times, Tensor] = {}  # (layers, 6 dim)
        self._prepared: set[Times] = set()
        self._selected: Tensor | None = None

    def prepare(self, times: Iterable[Times]) -> None:
        """Compute the outputs for the timesteps of the next forward passes together, and drop those
        of others.
        """
        self._prepared = set(times)
        if not self._prepared <= self._outputs.keys():
            self._keep(self._prepared)
            self._compute(self._prepared)

    def select(self, times: Sequence[Times]) -> None:
        """Choose the timesteps of the samples of the next forward pass, which need not be
        prepared.
        """
        missing = set(times) - self._outputs.keys()
        if missing:
            if len(self._outputs.keys() - self._prepared) >= _MOST_UNPREPARED:
                self._keep({*times, *self._prepared})
            self._compute(missing)
        # (layers, batch, 6 dim)
        selected = torch.stack([self._outputs[each] for each in times], dim=1)
        self._selected = selected.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()

    def take(self) -> Tensor:
        """Return the selected outputs for image and text. Shape: (blocks, batch, 2, 6 dim)."""
        assert self._selected is not None, "select must be called before each forward pass"
        selected = self._selected
        self._selected = None
        return selected

    def _keep(self, times: set[Times]) -> None:
        self._outputs = {each: output for each, output in self._outputs.items() if each in times}

    @torch.no_grad()
    def _compute(self, times: Iterable[Times]) -> None:
        """Compute the outputs for ``times`` that are missing, under the caller's autocast."""
        missing = [each for each in times if each not in self._outputs]
        device = device_of(self.time_embed)
        embedded = []
        for time, end in missing:
            ends = None if end is None else _filled(end, device)
            embedded.append(self.time_embed(_filled(time, device), timestep_r=ends))
        by_layer = []
        for norm in self.norms:
            with on_device(norm.linear):
                by_layer.append(torch.cat([norm.linear(norm.silu(time)) for time in embedded]))
        self._outputs |= zip(missing, torch.stack(by_layer, dim=1))


def _filled(time: float, device: torch.device) -> Tensor:
    """Return a timestep as the transformer receives it, without a copy to the device.

    Shape: (1,).
    """
    return torch.full((1,), time, dtype=torch.float32, device=device)


def _norms(transformer: nn.Module) -> list[nn.Module]:
    """Return the norms of image and text of each block, whose layers ``linear`` compute the
    modulation.
    """
    return [
        norm
        for block in transformer.transformer_blocks
        for norm in (block.norm1, block.norm1_context)
    ]
