"""Render the first frames and write the prompts of ``configs/wan22_1gpu_i2v_nft.yaml``:
``python -m examples.first_frames``.

A ray tracer draws balls and boxes on a floor. The images stand in for your own: a prompts CSV with a
column ``ref_image_path`` is all that a run needs.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.files import make_folder

SIZE = (352, 640)  # height and width in pixels
SAMPLES = 3  # rays per pixel along a side
CAMERA = np.array([0.0, 1.3, -5.0])
LIGHT = np.array([0.5, 0.8, -0.35])
COLORS = {
    "red": (0.80, 0.10, 0.08),
    "blue": (0.10, 0.25, 0.75),
    "green": (0.10, 0.55, 0.20),
    "yellow": (0.90, 0.75, 0.10),
    "orange": (0.95, 0.45, 0.08),
    "white": (0.90, 0.90, 0.88),
    "purple": (0.45, 0.15, 0.60),
}
GROUND_COLORS = {
    "wooden": (0.55, 0.36, 0.20),
    "grey": (0.45, 0.45, 0.47),
    "green": (0.25, 0.42, 0.22),
    "sandy": (0.76, 0.66, 0.47),
}


@dataclass(frozen=True)
class Object:
    """A ball or a box that stands on the floor."""

    kind: str  # ball or box
    color: str
    x: float  # to the right
    z: float  # away from the camera
    size: float  # radius, or half the side

    @property
    def center(self) -> np.ndarray:
        return np.array([self.x, self.size, self.z])


@dataclass(frozen=True)
class Scene:
    """Objects on a floor, and prompts that say how they move."""

    name: str
    floor: str
    objects: tuple[Object, ...]
    prompts: tuple[str, ...]


TRAINING = (
    Scene(
        "red_ball",
        "wooden",
        (Object("ball", "red", 0.0, 0.0, 0.55),),
        (
            "A red ball rolls slowly to the left across a wooden floor and out of the frame.",
            "A red ball lies on a wooden floor while the camera moves closer to it.",
            "A red ball on a wooden floor jumps up and falls back onto the same spot.",
        ),
    ),
    Scene(
        "blue_box",
        "grey",
        (Object("box", "blue", 0.3, 0.3, 0.5),),
        (
            "A blue box slides to the right over a grey floor; the camera does not move.",
            "The camera circles around a blue box that stands still on a grey floor.",
            "A blue box on a grey floor tips over slowly onto its side.",
        ),
    ),
    Scene(
        "two_balls",
        "green",
        (Object("ball", "yellow", -1.0, 0.2, 0.45), Object("ball", "white", 1.1, 0.4, 0.45)),
        (
            "A yellow ball and a white ball on a green floor roll towards each other and touch.",
            "The yellow ball rolls away to the left, and the white ball stays where it is.",
            "Two balls on a green floor roll slowly towards the camera, side by side.",
        ),
    ),
    Scene(
        "ball_and_box",
        "sandy",
        (Object("ball", "orange", -1.2, 0.0, 0.4), Object("box", "purple", 0.8, 0.6, 0.55)),
        (
            "An orange ball rolls over sand to a purple box, touches it and stops.",
            "A purple box slides slowly away from an orange ball, which does not move.",
            "The camera rises and looks down on an orange ball and a purple box on sand.",
        ),
    ),
    Scene(
        "three_boxes",
        "wooden",
        (
            Object("box", "green", -1.4, 0.6, 0.35),
            Object("box", "yellow", 0.0, 0.4, 0.35),
            Object("box", "red", 1.4, 0.6, 0.35),
        ),
        (
            "Three boxes stand in a row on a wooden floor; the yellow one in the middle slides forward.",
            "The camera moves slowly from left to right past a green, a yellow and a red box.",
            "The red box on the right slides to the left until it touches the yellow box.",
        ),
    ),
    Scene(
        "white_ball",
        "grey",
        (Object("ball", "white", 0.6, 0.8, 0.8),),
        (
            "A large white ball rolls to the left over a grey floor, and its shadow moves with it.",
            "The light fades slowly over a large white ball on a grey floor.",
            "A large white ball on a grey floor rolls backwards and becomes smaller.",
        ),
    ),
    Scene(
        "ball_behind_box",
        "green",
        (Object("box", "orange", 0.0, -0.3, 0.45), Object("ball", "blue", 1.0, 1.2, 0.5)),
        (
            "A blue ball rolls to the left, passes behind an orange box and appears again.",
            "An orange box slides to the right and hides the blue ball behind it.",
            "The camera moves to the right around an orange box, towards a blue ball.",
        ),
    ),
    Scene(
        "small_balls",
        "sandy",
        (
            Object("ball", "red", -0.9, -0.5, 0.25),
            Object("ball", "green", 0.0, 0.2, 0.25),
            Object("ball", "purple", 0.9, 0.9, 0.25),
        ),
        (
            "Three small balls on sand roll to the right one after another, the red one first.",
            "The green ball in the middle jumps twice, and the other two balls lie still.",
            "Wind blows three small balls over the sand and out of the frame on the left.",
        ),
    ),
)
VALIDATION = (
    Scene(
        "yellow_box",
        "grey",
        (Object("box", "yellow", -0.4, 0.2, 0.55),),
        (
            "A yellow box slides to the left over a grey floor and stops at the edge of the frame.",
            "The camera moves back slowly from a yellow box on a grey floor.",
        ),
    ),
    Scene(
        "green_ball",
        "sandy",
        (Object("ball", "green", 0.9, 0.3, 0.5),),
        (
            "A green ball rolls over sand from right to left and leaves the frame.",
            "A green ball lies on sand; it jumps once, high, and comes to rest again.",
        ),
    ),
    Scene(
        "ball_on_each_side",
        "wooden",
        (
            Object("ball", "purple", -1.3, 0.4, 0.4),
            Object("box", "white", 0.0, 0.8, 0.4),
            Object("ball", "orange", 1.3, 0.4, 0.4),
        ),
        (
            "Two balls roll from both sides to a white box on a wooden floor and stop at it.",
            "The white box between two balls slides towards the camera; the balls do not move.",
        ),
    ),
    Scene(
        "box_before_ball",
        "green",
        (Object("box", "red", -0.8, -0.4, 0.35), Object("ball", "yellow", 0.4, 1.0, 0.65)),
        (
            "A yellow ball rolls to the left until the red box hides half of it.",
            "The camera moves closer to a red box, and the yellow ball behind it leaves the frame.",
        ),
    ),
)


def render(scene: Scene) -> Image.Image:
    """Return the scene as an image of ``SIZE``."""
    height, width = (SAMPLES * side for side in SIZE)
    y, x = np.mgrid[:height, :width] + 0.5
    rays = np.stack([(x - width / 2) / height, 0.34 - y / height, np.full_like(x, 1.15)], axis=-1)
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    light = LIGHT / np.linalg.norm(LIGHT)
    # the sky is brighter towards the horizon
    image = np.array([0.75, 0.82, 0.90]) - 0.5 * np.clip(rays[..., 1:2], 0, 1)
    nearest = np.full(x.shape, np.inf)
    for item in (None, *scene.objects):
        distance, normal = _hit(item, CAMERA, rays)
        is_seen = distance < nearest
        nearest = np.where(is_seen, distance, nearest)
        points = CAMERA + np.where(is_seen, distance, 0)[..., None] * rays
        others = [other for other in scene.objects if other is not item]
        is_lit = ~np.logical_or.reduce(
            [np.isfinite(_hit(other, points, light)[0]) for other in others]
            or [np.zeros(x.shape, dtype=bool)]
        )
        diffuse = (0.35 + 0.65 * np.clip(normal @ light, 0, None) * is_lit)[..., None]
        if item is None:
            haze = np.exp(-np.where(is_seen, distance, 0) / 40)[..., None]
            shaded = haze * diffuse * GROUND_COLORS[scene.floor] + (1 - haze) * image
        else:
            between = (light - rays) / np.linalg.norm(light - rays, axis=-1, keepdims=True)
            shine = 0.3 * is_lit * np.clip((normal * between).sum(-1), 0, 1) ** 60
            shaded = diffuse * COLORS[item.color] + shine[..., None]
        image = np.where(is_seen[..., None], shaded, image)
    image = image.reshape(SIZE[0], SAMPLES, SIZE[1], SAMPLES, 3).mean((1, 3))
    return Image.fromarray((255 * np.clip(image, 0, 1) ** (1 / 1.6)).round().astype(np.uint8))


def _hit(item: Object | None, origin: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the distances at which rays hit an object, or the floor for None, inf where they do
    not; and the normals there.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if item is None:
            distance = -origin[..., 1] / rays[..., 1]
            normal = np.broadcast_to([0.0, 1.0, 0.0], rays.shape)
        elif item.kind == "ball":
            offset = origin - item.center
            half = (offset * rays).sum(-1)
            distance = -half - np.sqrt(half**2 - (offset**2).sum(-1) + item.size**2)
            normal = (offset + distance[..., None] * rays) / item.size
        else:
            offset = origin - item.center
            near = (-np.sign(rays) * item.size - offset) / rays
            far = (np.sign(rays) * item.size - offset) / rays
            distance = near.max(-1)
            distance = np.where(distance < far.min(-1), distance, np.nan)
            normal = -np.sign(rays) * (near == near.max(-1, keepdims=True))
        return np.where(distance > 1e-6, distance, np.inf), np.nan_to_num(normal)


@exit_on_error("examples.first_frames")
def main() -> None:
    parser = Parser(__doc__.splitlines()[0], prog="examples.first_frames")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("assets/first_frames"), help="folder to write"
    )
    out = parser.parse_args().output_dir
    make_folder(out / "images")
    for name, scenes in (("train", TRAINING), ("valid", VALIDATION)):
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["prompt", "ref_image_path"])
            for scene in scenes:
                image = f"images/{scene.name}.jpg"
                render(scene).save(out / image, quality=90)
                writer.writerows([prompt, image] for prompt in scene.prompts)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
