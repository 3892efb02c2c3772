"""Moving pictures of several policies and a page that shows them: the pictures of docs/gallery.md.

<out>/runs/NAME/               runs of the miniature, if no policies are given
<out>/videos/POLICY/0000.mp4   videos, as of scripts.compare_policies
<pictures>/gallery_POLICY.webp the videos of a policy beside each other
<out>/gallery.md               a page with all of them
"""

import json
import os
import re
import sys
from pathlib import Path

from hyvideo.files.files import ROOT
from hyvideo.files.steps import run
from hyvideo.records.run_files import write_text
from studies.figures.moving_picture import moving_picture, read_clip

PAGE = "gallery.md"
# Runs of docs/gallery.md by name, with their flags of post_train.py.
MINIATURES = {
    "sage_grpo": ["--config", "configs/miniature.yaml"],
    "nft": ["--config", "configs/miniature_nft.yaml"],
    "guidance": ["--config", "configs/miniature_guidance.yaml"],
    "draft": ["--config", "configs/miniature_draft.yaml"],
    "student": ["--config", "configs/miniature_student.yaml"],
    "hacked": ["--config", "configs/miniature_paper.yaml", "--reward_weights", '{"MQ": 1}']
    + ["--learning_rate", "1e-3", "--kl_weight", "0", "--validation_interval", "10"],
}
SUFFIXES = {"student": "@2steps"}
PROMPTS = [
    "a red circle moves right",
    "a blue triangle moves left",
    "a yellow square moves down",
    "a green circle moves up",
    "a green square moves left",
]


def train_miniatures(out: Path) -> tuple[list[str], int]:
    """Train the runs that are not finished; return the policies of the gallery and an exit code."""
    policies = ["base", "base@3"]
    for name, flags in MINIATURES.items():
        folder = (out / "runs" / name).resolve()
        print(f"\ntrain {name}: {' '.join(flags)}", flush=True)
        command = [sys.executable, ROOT / "post_train.py", *flags]
        code = run([*command, "--num_threads", 1, "--output_dir", folder])
        if code:
            return policies, code
        policies.append(f"{name}={folder}{SUFFIXES.get(name, '')}")
    return policies, 0


def make_gallery(
    policies: list[str], prompts: list[str], flags: list[str], out: Path, pictures: Path
) -> int:
    """Sample the policies, draw their pictures and write the page; return an exit code.

    ``policies`` are words of scripts.compare_policies, and ``flags`` its further flags.
    """
    videos = out.resolve() / "videos"
    command = [sys.executable, "-m", "scripts.compare_policies", *flags, "--output_dir", videos]
    command += ["--policies", *policies]
    if prompts:
        command += ["--prompt", *prompts]
    code = run(command)
    if code:
        return code
    pictures.mkdir(parents=True, exist_ok=True)
    names = [_name(word) for word in policies]
    files = [draw(videos / name, pictures) for name in names]
    write_text(out / PAGE, page(names, files, videos, out))
    print(f"wrote {out / PAGE} and the pictures in {pictures}")
    return 0


def draw(videos: Path, pictures: Path) -> Path:
    """Write the moving picture of a policy, with its videos beside each other, and return its
    path.
    """
    records = [_record(file) for file in sorted(videos.glob("*.mp4"))]
    clips = {}
    for number, record in enumerate(records):
        clips[str(number)] = [read_clip(videos / f"{number:04d}.mp4", *_size(record))]
    path = pictures / f"gallery_{videos.name.replace('@', '_')}.webp"
    moving_picture(path, [], clips, fps=records[0]["fps"])
    return path


def page(names: list[str], files: list[Path], videos: Path, out: Path) -> str:
    """Return the page of the pictures."""
    records = [_record(file) for file in sorted((videos / names[0]).glob("*.mp4"))]
    lines = [
        "# Gallery",
        "",
        "All rows have the same prompts and noise. The prompts, from left to right:",
    ]
    lines += ["", *(f"{number}. {record['prompt']}" for number, record in enumerate(records, 1))]
    for name, file in zip(names, files):
        lines += ["", f"## {name}", "", f"![Videos of {name}]({os.path.relpath(file, out)})"]
    return "\n".join(lines) + "\n"


def _name(word: str) -> str:
    """Return the folder of a policy of scripts.compare_policies: ``student@2steps`` of
    ``student=runs/student@2steps``.
    """
    name, has_path, path = word.partition("=")
    return name + re.search(r"(@\d+(\.\d+)?)?(@\d+steps)?$", path)[0] if has_path else name


def _record(file: Path) -> dict:
    """Return the settings of a video."""
    return json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))


def _size(record: dict) -> tuple[int, int]:
    return record["height"], record["width"]
