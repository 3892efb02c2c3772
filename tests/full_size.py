"""Video files of the size of real runs, 121 frames of 480 x 864, written in seconds."""

from pathlib import Path

import av
import numpy as np

NUM_FRAMES, HEIGHT, WIDTH = 121, 480, 864
FPS = 24


def write_full_size(path: Path, *, num_frames: int = NUM_FRAMES, seed: int = 0) -> Path:
    """Write a clip with moving colors and film grain, about 20 MB as in real runs, and return its
    path.
    """
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    colors = np.stack(
        [rows * 200 // HEIGHT, columns * 200 // WIDTH, (rows + columns) % 200], axis=-1
    )
    grain = random.integers(0, 56, (HEIGHT, WIDTH, 3))
    with av.open(str(path), "w") as file:
        stream = file.add_stream(
            "libx264",
            FPS,
            width=WIDTH,
            height=HEIGHT,
            pix_fmt="yuv420p",
            options={"preset": "ultrafast", "crf": "20"},
        )
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = 6
        codec.color_range = 1
        for number in range(num_frames):
            picture = np.roll(colors, 3 * number, axis=1) + np.roll(grain, 97 * number, axis=(0, 1))
            file.mux(
                stream.encode(av.VideoFrame.from_ndarray(picture.astype(np.uint8), format="rgb24"))
            )
        file.mux(stream.encode())
    return path
