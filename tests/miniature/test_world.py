"""Tests of the miniature's captions, shapes and rendered videos."""

import math

import pytest
import torch

from hyvideo.data.randomness import generator
from hyvideo.miniature.world import (
    CAPTIONS,
    HEADINGS,
    LABELS,
    PALETTE,
    caption,
    labels_of,
    pixel_grid,
    render,
    signed_distances,
)


def rng(*key):
    return generator(0, "test world", *key)


def bright(videos):
    """Return the weight of the object in each pixel. Shape: (batch, frames, height, width)."""
    return ((videos.amax(1) - videos.amin(1)) / 2 - 0.3).clamp(min=0)


# --- captions ----------------------------------------------------------------------------------


def test_there_are_48_captions_that_map_back_to_their_labels():
    assert len(set(CAPTIONS)) == len(CAPTIONS) == 48
    assert CAPTIONS[0] == "a red circle moves right"
    assert torch.equal(labels_of(CAPTIONS), LABELS)
    assert [caption(label) for label in LABELS] == CAPTIONS


def test_quoted_text_may_follow_a_caption():
    prompts = [f'{caption}, "●"' for caption in CAPTIONS]
    assert torch.equal(labels_of(prompts), LABELS)
    with pytest.raises(ValueError, match="a sign"):
        labels_of(['a sign that says "HELLO"'])


def test_an_unknown_caption_raises_an_error_with_the_supported_words():
    with pytest.raises(ValueError, match="a cat"):
        labels_of([CAPTIONS[0], "a cat"])


# --- shapes ------------------------------------------------------------------------------------


def test_the_three_shapes_have_the_area_of_the_circle():
    side = torch.linspace(-3, 3, 1201)
    dy, dx = torch.meshgrid(side, side, indexing="ij")
    inside = signed_distances(dx, dy, torch.tensor(1.0)) < 0
    areas = inside.sum((1, 2)) * (side[1] - side[0]) ** 2
    torch.testing.assert_close(areas, torch.full((3,), math.pi), rtol=0.01, atol=0)


def test_the_triangle_points_up():
    """y increases downwards: the tip is far above the center, the base slightly below it."""
    up, down = (
        signed_distances(torch.tensor(0.0), torch.tensor(y), torch.tensor(2.0))[2]
        for y in (-2.5, 2.5)
    )
    assert up < 0 < down


# --- videos -------------------------------------------------------------------------------------


def test_equal_generators_render_equal_videos():
    assert torch.equal(render(LABELS[:4], rng("same")), render(LABELS[:4], rng("same")))
    assert not torch.equal(render(LABELS[:4], rng("same")), render(LABELS[:4], rng("other")))


def test_the_object_moves_in_the_captions_direction():
    weight = bright(render(LABELS, rng("move")))
    x, y = pixel_grid(32, 32)
    mass = weight.sum((2, 3))
    center = torch.stack([(weight * x).sum((2, 3)) / mass, (weight * y).sum((2, 3)) / mass], dim=-1)
    moved = center[:, -1] - center[:, 0]
    heading = HEADINGS[LABELS[:, 2]]
    along = (moved * heading).sum(1)
    across = (moved * heading.flip(1)).sum(1)
    assert (along > 8).all() and (along < 14).all()
    assert across.abs().max() < 0.6


def test_the_object_has_the_color_of_its_caption():
    videos = (render(LABELS, rng("color")) + 1) / 2
    weight = bright(render(LABELS, rng("color"))) > 0.15
    color = (videos * weight[:, None]).sum((2, 3, 4)) / weight.sum((1, 2, 3))[:, None]
    assert torch.equal(torch.cdist(color, PALETTE).argmin(1), LABELS[:, 0])


def test_a_defect_changes_only_its_own_video():
    strength = torch.zeros(8)
    strength[3] = 1.0
    clean, corrupted = (render(LABELS[:8], rng("one"), s) for s in (torch.zeros(8), strength))
    changed = [not torch.equal(a, b) for a, b in zip(clean, corrupted)]
    assert changed == [i == 3 for i in range(8)]


def test_the_first_frame_of_an_object_that_starts_in_the_middle_does_not_show_its_direction():
    """The four directions of a color and shape, with equal random numbers, begin with one frame."""
    labels = LABELS[:4]
    videos = torch.cat([render(label[None], rng("middle"), from_middle=True) for label in labels])
    assert torch.equal(videos[:, :, 0], videos[:1, :, 0].expand(4, -1, -1, -1))
    x, y = pixel_grid(32, 32)
    weight = bright(videos)
    total = weight.sum((2, 3))
    path = torch.stack([(weight * axis).sum((2, 3)) / total for axis in (x, y)], dim=-1)
    assert (path[:, 0] - 16).abs().max() < 2
    moved = path[:, -1] - path[:, 0]
    assert torch.equal((moved / 7).round().clamp(-1, 1), HEADINGS[labels[:, 2]])
