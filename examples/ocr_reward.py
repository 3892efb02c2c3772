"""Reward for the text that a video shows, read by an OCR network (PP-OCRv6 of the package rapidocr).

    python -m pip install rapidocr==3.10.0 onnxruntime==1.32.0
    python post_train.py --config FILE.yaml --reward_model examples/ocr_reward.py:Ocr \\
        --reward_weights '{"ocr_log": 1}'

The prompt says in double quotes what the video should show: ``a sign that says "HELLO"``. Case and
spaces do not count. docs/rewards.md#text-in-the-video describes the two scores.
"""

import importlib.util
import math
import re
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.rewards.rewards import Scorer

INSTALL = "python -m pip install rapidocr==3.10.0 onnxruntime==1.32.0"
QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')
HEIGHT = 48  # of a line, as the recognizer was trained
WIDTHS = 160  # a line is padded to a multiple of this width
LEAST_PROBABILITY = 1e-4  # of a character, at which ``ocr_log`` is 0


class Ocr(Scorer):
    """Scorer of quoted text, averaged over evenly spaced frames; both scores are in [0, 1].

    ``ocr`` is 1 - edit distance / length of the text. ``ocr_log`` is the mean log-probability of a
    character, which also tells wrong videos apart.
    """

    dimensions = ("ocr", "ocr_log")

    def __init__(self, num_frames: int = 4, find_lines: bool = True):
        """``find_lines`` false reads a frame as one line, for tiny frames and much less time."""
        if not (importlib.util.find_spec("rapidocr") and importlib.util.find_spec("onnxruntime")):
            raise ValueError(f"the OCR reward needs two packages: {INSTALL}")
        self.num_frames = num_frames
        self.detector = Detector() if find_lines else None
        self.recognizer = Recognizer()

    def check_prompts(self, prompts: list[str]) -> None:
        for prompt in prompts:
            text = wanted_text(prompt)
            if not text:
                raise ValueError(f'the OCR reward needs text in double quotes, got "{prompt}"')
            unknown = [letter for letter in text if letter not in self.recognizer.classes]
            if unknown:
                raise ValueError(f'the OCR network cannot read {unknown[0]!r} of "{prompt}"')

    def score(self, videos, prompts, *, fps):
        frames = [_evenly_spaced(video, self.num_frames) for video in videos]
        lines = [self._lines(frame) for video in frames for frame in video]
        read = iter(self.recognizer([line for of_frame in lines for line in of_frame]))
        # by frame, the probabilities of its lines
        pages = iter([[next(read) for _ in of_frame] for of_frame in lines])
        rows = []
        for video, prompt in zip(frames, prompts):
            text = wanted_text(prompt)
            scores = [self._frame_scores(next(pages), text) for _ in video]
            ocr, ocr_log = (sum(column) / len(column) for column in zip(*scores))
            rows.append({"ocr": ocr, "ocr_log": ocr_log})
        return rows

    def _lines(self, frame: Tensor) -> list[Tensor]:
        return [frame] if self.detector is None else self.detector(frame)

    def _frame_scores(self, lines: list[Tensor], text: str) -> tuple[float, float]:
        """Return both scores of a frame from the probabilities of its lines."""
        if not lines:
            return 0.0, 0.0
        whole = torch.cat(lines)  # text may be spread over several lines
        found = self.recognizer.text(whole)
        distance = 0 if text in found else min(edit_distance(text, found), len(text))
        log_probability = max(
            self.recognizer.log_probability(part, text) for part in (*lines, whole)
        )
        ocr_log = 1 - log_probability / len(text) / math.log(LEAST_PROBABILITY)
        return 1 - distance / len(text), max(0.0, ocr_log)


class Detector:
    """Finds the lines of text in a frame, from top to bottom."""

    def __init__(self):
        from rapidocr import RapidOCR

        # frames are not enlarged
        settings = {"Det.limit_type": "max", "Det.limit_side_len": 960}
        settings["Global.log_level"] = "error"
        settings["EngineConfig.onnxruntime.intra_op_num_threads"] = torch.get_num_threads()
        self.engine = RapidOCR(params=settings)

    def __call__(self, frame: Tensor) -> list[Tensor]:
        """Return the lines of a frame, turned upright. Shapes: uint8 (3, height, width)."""
        from rapidocr.utils.process_img import get_rotate_crop_image

        image = frame.flip(0).permute(1, 2, 0).contiguous().numpy()  # blue, green, red
        boxes = self.engine(image, use_rec=False, use_cls=False).boxes
        if boxes is None:
            return []
        crops = [get_rotate_crop_image(image, box.astype("float32")) for box in boxes]
        return [torch.from_numpy(crop.copy()).permute(2, 0, 1).flip(0) for crop in crops]


class Recognizer:
    """Reads lines of text: probabilities of all characters in each column of 8 pixels."""

    def __init__(self):
        import onnxruntime
        import rapidocr

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            Path(rapidocr.__file__).parent / "models" / "PP-OCRv6_rec_small.onnx",
            options,
            providers=["CPUExecutionProvider"],
        )
        properties = self.session.get_modelmeta().custom_metadata_map
        letters = ["", *properties["character"].splitlines(), " "]
        # Upper case shares the class of lower case, and a space that of no character.
        self.letters = [letter.strip().lower() for letter in letters]
        self.classes: dict[str, int] = {}
        for number, letter in enumerate(self.letters):
            self.classes.setdefault(letter, number)
        self.class_of = torch.tensor([self.classes[letter] for letter in self.letters])

    def __call__(self, lines: list[Tensor]) -> list[Tensor]:
        """Return the probabilities of each line. Shapes: uint8 (3, height, width) to (columns,
        classes).

        Only lines of one padded width share a batch, so that no line depends on the others.
        """
        by_width = defaultdict(list)
        for number, line in enumerate(lines):
            pixels = _resized(line)
            by_width[pixels.shape[-1]].append((number, pixels))
        results = {}
        for batch in by_width.values():
            for start in range(0, len(batch), 16):
                numbers, pixels = zip(*batch[start : start + 16])
                results |= zip(numbers, self._read(torch.stack(pixels)))
        return [results[number] for number in range(len(lines))]

    def _read(self, pixels: Tensor) -> Tensor:
        (name,) = (node.name for node in self.session.get_inputs())
        read = torch.from_numpy(self.session.run(None, {name: pixels.numpy()})[0])
        return torch.zeros_like(read).index_add(2, self.class_of, read)

    def text(self, line: Tensor) -> str:
        """Return the text of a line's probabilities: the likeliest class of each column, where equal
        neighbors count once.
        """
        classes = line.argmax(1).unique_consecutive().tolist()
        return "".join(self.letters[number] for number in classes)

    def log_probability(self, line: Tensor, text: str) -> float:
        """Return the log-probability of ``text`` (connectionist temporal classification)."""
        letters = ["", *sorted(set(text))]  # no other class has a part in it
        log_probs = line[:, [self.classes[letter] for letter in letters]].clamp(min=1e-30).log()
        target = torch.tensor([letters.index(letter) for letter in text])
        loss = F.ctc_loss(log_probs, target, (len(line),), (len(target),), reduction="sum")
        return -loss.item()


def wanted_text(prompt: str) -> str:
    """Return the quoted texts of a prompt in lower case without spaces; empty if there are none."""
    quoted = ("".join(groups) for groups in QUOTED.findall(prompt))
    return "".join("".join(quoted).lower().split())


def edit_distance(first: str, second: str) -> int:
    """Return the number of letters to insert, delete or replace that turn one text into the other."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            replaced = diagonal + (letter != other)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, replaced)
    return row[-1]


def _evenly_spaced(video: Tensor, count: int) -> Tensor:
    """Return ``count`` frames of a video, or all if it has fewer, on the CPU."""
    count = min(count, len(video))
    return video[torch.linspace(0, len(video) - 1, count).round().long()].cpu()


def _resized(line: Tensor) -> Tensor:
    """Return a line in the recognizer's format: its height, blue, green, red in [-1, 1], padded
    with 0 on the right.
    """
    height, width = line.shape[1:]
    width = max(1, math.ceil(HEIGHT * width / height))
    pixels = F.interpolate(line[None].float(), (HEIGHT, width), mode="bilinear")[0]
    pixels = pixels.flip(0) / 127.5 - 1
    return F.pad(pixels, (0, -width % WIDTHS))
