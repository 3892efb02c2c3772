"""The OCR reward: its network reads rendered text, and DiffusionNFT trains the miniature on it.

The shapes of the miniature are signs that the network knows: ●, ■ and ▲.
"""

import json
from importlib.util import find_spec

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import post_train
from examples import ocr_reward
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world

HAS_PACKAGES = all(map(find_spec, ("rapidocr", "onnxruntime", "cv2")))
needs_packages = pytest.mark.skipif(not HAS_PACKAGES, reason=f"needs {ocr_reward.INSTALL}")
SIGNS = dict(zip(world.SHAPES, "●■▲"))


def picture(text):
    """Return white text on a green picture. Shape: (3, 240, 320)."""
    image = Image.new("RGB", (320, 240), (40, 90, 60))
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 40)
    ImageDraw.Draw(image).text((50, 60), text, font=font, fill="white")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize(
    "prompt, text",
    [
        ('a sign that says "Hello World"', "helloworld"),
        ('a “left” and a "right" sign', "leftright"),
        ("no quotes", ""),
    ],
)
def test_the_wanted_text_is_what_the_prompt_quotes(prompt, text):
    assert ocr_reward.wanted_text(prompt) == text


@pytest.mark.parametrize(
    "first, second, distance",
    [("", "abc", 3), ("sale", "saie", 1), ("coffee", "coffe", 1), ("abc", "bcd", 2), ("a", "a", 0)],
)
def test_the_edit_distance_counts_inserted_deleted_and_replaced_letters(first, second, distance):
    assert ocr_reward.edit_distance(first, second) == distance
    assert ocr_reward.edit_distance(second, first) == distance


@pytest.mark.slow
@needs_packages
def test_text_is_read_frame_by_frame_and_scored_without_case_and_spaces():
    scorer = ocr_reward.Ocr(num_frames=4)
    shown = ["OPEN\n24", "SAIE", "HELLO", "xxxx", ""]
    videos = [picture(text)[None] for text in shown]
    videos.append(torch.stack([picture("HELLO"), picture("")]))  # half of the frames
    prompts = ['"open 24"', '"SALE"', '"HELLO"', '"GRPO"', '"GRPO"', '"HELLO"']
    scores = scorer.score(videos, prompts, fps=8)
    assert [row["ocr"] for row in scores] == [1, 0.75, 1, 0, 0, 0.5]
    logs = [row["ocr_log"] for row in scores]
    assert logs[0] > 0.99 and logs[2] > 0.99 and 0.5 < logs[1] < 0.9
    assert logs[3] == logs[4] == 0 and logs[5] == pytest.approx(logs[2] / 2)
    with pytest.raises(ValueError, match="a cat"):
        scorer.check_prompts(["a cat"])
    with pytest.raises(ValueError, match="🦜"):
        scorer.check_prompts(['"🦜"'])


@pytest.mark.slow
@needs_packages
def test_the_network_tells_the_shapes_of_the_miniature_apart():
    videos = to_uint8(world.render(world.LABELS, generator(0, "ocr"))).transpose(1, 2).contiguous()
    scorer = ocr_reward.Ocr(num_frames=1, find_lines=False)
    rows = {}
    for shape, sign in SIGNS.items():
        prompts = [f'{caption}, "{sign}"' for caption in world.CAPTIONS]
        scorer.check_prompts(prompts)
        rows[shape] = torch.tensor(
            [row["ocr_log"] for row in scorer.score(list(videos), prompts, fps=world.FPS)]
        )
    best = torch.stack(list(rows.values())).argmax(0)
    assert torch.equal(best, world.LABELS[:, 1])
    alone = scorer.score([videos[7]], [f'"{SIGNS["circle"]}"'], fps=world.FPS)
    assert alone[0]["ocr_log"] == pytest.approx(rows["circle"][7].item(), abs=1e-4)


@pytest.mark.slow
@needs_packages
def test_diffusion_nft_trains_the_miniature_on_what_the_network_reads(tmp_path, exit_code):
    prompts = "assets/miniature/prompts"
    options = {"examples/ocr_reward.py:Ocr": {"find_lines": False, "num_frames": 2}}
    words = ["--config", "configs/miniature_nft.yaml", "--output_dir", tmp_path / "run"]
    words += ["--prompts_csv", f"{prompts}/train_text.csv", "--num_threads", 1]
    words += ["--valid_video_csv", f"{prompts}/valid_text.csv", "--log_num_videos", 0]
    words += ["--reward_model", "examples/ocr_reward.py:Ocr", "--reward_weights", '{"ocr_log": 1}']
    words += ["--reward_config", json.dumps(options), "--held_out_reward_model", "miniature"]
    words += ["--max_steps", 10, "--validation_interval", 10, "--report", "false"]
    assert exit_code(post_train.main, *words) == 0
    before, after = (
        json.loads((tmp_path / "run" / "samples" / number / "scores.json").read_text())
        for number in ("000000", "000010")
    )

    def gain(name):
        means = [sum(row[name] for row in videos) / len(videos) for videos in (before, after)]
        return means[1] - means[0]

    assert len(before) == len(after) == 96
    assert gain("ocr_log") > 0.05
    assert gain("held_out/miniature/TA") > 0
