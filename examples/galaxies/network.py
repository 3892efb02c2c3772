"""Score network of the package galaxygrad: an MLP mixer over patches of an image.

The names of the modules are ours, the layers and their order are those of galaxygrad 0.1.9.
"""

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn


class Mixer(nn.Module):
    """A linear layer, ReLU and a linear layer over the last dimension."""

    def __init__(self, width: int, hidden_width: int):
        super().__init__()
        self.up = nn.Linear(width, hidden_width)
        self.down = nn.Linear(hidden_width, width)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(values)))


class MixerBlock(nn.Module):
    """Mixes the patches of each channel, then the channels of each patch."""

    def __init__(self, num_patches: int, width: int, hidden_width: int):
        super().__init__()
        self.patch_mixer = Mixer(num_patches, hidden_width)
        self.channel_mixer = Mixer(width, hidden_width)
        self.patch_norm = nn.LayerNorm((width, num_patches))
        self.channel_norm = nn.LayerNorm((num_patches, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Shape: (images, width, patches)."""
        tokens = tokens + self.patch_mixer(self.patch_norm(tokens))
        tokens = tokens.transpose(1, 2)
        tokens = tokens + self.channel_mixer(self.channel_norm(tokens))
        return tokens.transpose(1, 2)


class GalaxyScoreNet(ModelMixin, ConfigMixin):
    """Score of a noisy image at a diffusion time between 0 and ``last_time``."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        image_size: int = 72,
        patch_size: int = 4,
        hidden_size: int = 64,  # width of a token
        mixer_size: int = 512,
        num_layers: int = 4,
        last_time: float = 10.0,
    ):
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.conv_in = nn.Conv2d(2, hidden_size, patch_size, stride=patch_size)
        self.conv_out = nn.ConvTranspose2d(hidden_size, 1, patch_size, stride=patch_size)
        self.blocks = nn.ModuleList(
            MixerBlock(num_patches, hidden_size, mixer_size) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm((hidden_size, num_patches))
        self.gradient_checkpointing = False

    def score(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the gradient of the log-density. Shapes: (images, 1, height, width), (images,)."""
        channel = (times / self.config.last_time).view(-1, 1, 1, 1).expand_as(images)
        patches = self.conv_in(torch.cat([images, channel], dim=1))
        tokens = patches.flatten(2)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens = self._gradient_checkpointing_func(block, tokens)
            else:
                tokens = block(tokens)
        return self.conv_out(self.norm(tokens).view_as(patches))
