"""diffusers' own transformer with this project's weights, and its inputs for the same samples."""

import diffusers
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights

from hyvideo.models.family import component_of, family_of
from hyvideo.models.hunyuan_video15.transformer import _image_channels
from hyvideo.models.wan.settings import TEXT_SLOTS as WAN_TEXT_SLOTS
from hyvideo.models.wan.transformer import with_given_video

TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729  # padded lengths of HunyuanVideo-1.5


def stock_twin(transformer, dtype=None):
    """Return a copy of the model with diffusers' own forward pass; the weights are shared unless
    ``dtype`` differs.
    """
    with init_empty_weights(include_buffers=False):
        twin = getattr(diffusers, component_of(transformer).class_name).from_config(
            transformer.config
        )
    state = {name: tensor.to(dtype) for name, tensor in transformer.state_dict().items()}
    twin.load_state_dict(state, strict=True, assign=True)
    return twin.eval()


def stock_inputs(transformer, latents, timestep, conditions):
    """Return the arguments of diffusers' forward pass for the same samples: padded conditions and,
    if any, masks.
    """
    common = {"timestep": timestep, "return_dict": False}
    if family_of(transformer).name == "wan":
        texts, _ = padded([sample.text for sample in conditions], WAN_TEXT_SLOTS)
        inputs = {"hidden_states": latents, "encoder_hidden_states": texts}
        if transformer.config.image_dim:
            inputs["hidden_states"] = with_given_video(conditions, latents)
            features = [sample.image.embeds for sample in conditions]
            inputs["encoder_hidden_states_image"] = torch.stack(features)
        return common | inputs
    slots = TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS
    texts, config = [c.text for c in conditions], transformer.config
    glyphs = [
        texts[0].new_zeros(0, config.text_embed_2_dim) if c.glyph is None else c.glyph
        for c in conditions
    ]
    images = [
        texts[0].new_zeros(0, config.image_embed_dim) if c.image is None else c.image.embeds
        for c in conditions
    ]
    tokens, masks = zip(*map(padded, (texts, glyphs, images), slots))
    return common | {
        "hidden_states": torch.cat([latents, _image_channels(latents, conditions)], dim=1),
        "encoder_hidden_states": tokens[0],
        "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": tokens[1],
        "encoder_attention_mask_2": masks[1],
        "image_embeds": tokens[2],
    }


def padded(samples, slots):
    """Return tokens padded with zeros (batch, slots, dim), and a mask of the valid tokens (batch,
    slots).
    """
    lengths = torch.tensor([len(sample) for sample in samples], device=samples[0].device)
    padded = torch.stack([F.pad(sample, (0, 0, 0, slots - len(sample))) for sample in samples])
    return padded, (torch.arange(slots, device=lengths.device) < lengths[:, None]).long()
