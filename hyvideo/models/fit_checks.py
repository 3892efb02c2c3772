"""Checks of a checkpoint folder before anything is loaded: what is missing, broken or does not fit, in sentences.

Configs and the headers of the weight files are read, a second or two for the full-size model.
"""

from pathlib import Path

from hyvideo.models import loading
from hyvideo.models.hunyuan_video15 import encoders
from hyvideo.models.weight_files import Folder, labelled, problems_of, read_header, tensor_problems


def check_checkpoint(
    root: str | Path,
    version: str | None,
    *,
    weights_needed: bool = True,
    with_glyphs: bool = False,
    with_images: bool = False,
) -> list[str]:
    """Problems that keep the parts of a run from loading; empty when there are none.

    ``weights_needed=False`` checks what ``random_weights_seed`` needs: the configs and the tokenizers.
    """
    checks = [
        lambda: model_problems(loading.TRANSFORMER, loading.transformer_folder(root, version), weights_needed),
        lambda: model_problems(loading.VAE, loading.vae_folder(root), weights_needed),
        lambda: encoders.text_encoder_problems(root, weights_needed),
        *([lambda: encoders.glyph_encoder_problems(root, weights_needed)] if with_glyphs else []),
        *([lambda: encoders.vision_encoder_problems(root, weights_needed)] if with_images else []),
    ]
    return [problem for check in checks for problem in problems_of(check)]


def model_problems(component: loading.Component, folder: Folder, weights_needed: bool = True) -> list[str]:
    """Problems that keep the transformer or the VAE of a folder from loading, by its config and headers."""
    model, is_original = loading.build_without_memory(component, folder)
    if not weights_needed:
        return []
    expected = loading.expected_shapes(component, model.state_dict(), is_original)
    return labelled(folder, tensor_problems(folder, expected, read_header(folder, loading.WEIGHTS_STEM)))


def size_problems(root: str | Path, version: str | None, *, num_frames: int, height: int, width: int) -> list[str]:
    """Reasons why the models of a folder cannot make videos of this size; empty when they can. Reads configs only."""
    transformer, _ = loading.read_arguments(loading.TRANSFORMER, loading.transformer_folder(root, version))
    vae, _ = loading.read_arguments(loading.VAE, loading.vae_folder(root))
    multiple = vae["spatial_compression_ratio"] * transformer["patch_size"]
    temporal = vae["temporal_compression_ratio"]
    problems = []
    if height % multiple or width % multiple:
        problems.append(f"height and width must be multiples of {multiple}, got {height} x {width}")
    if num_frames % temporal != 1:
        problems.append(f"the number of frames must be {temporal}n + 1, got {num_frames}")
    return problems
