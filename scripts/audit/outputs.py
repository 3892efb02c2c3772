"""What leaves a run, made again by the public commands: scores of saved videos, and videos of the
last validated checkpoint.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import pstdev
from tempfile import TemporaryDirectory

from scripts.audit.run import ROOT, Run
from scripts.audit.statements import Audit, CannotCheck

TOPIC = "What leaves the run"
CODEC = 0.15  # of the spread of the rewards, by which the codec may change one, and further
LEAST = 0.05  # where videos hardly differ; the codec changed one of a barely trained run by 0.044
PIXELS = 2.0  # mean difference of videos in levels of 255, by which batches may change one


def audit_scores(run: Run, audit: Audit) -> None:
    """Score saved videos again."""
    text = "saved videos, scored again by scripts.evaluate, have their rewards up to the codec"
    with audit.compare(TOPIC, text, "rollouts/, samples/, *.mp4") as rows:
        newest = [max(each, default=None) for each in (run.rollout_scores, run.validations)]
        for kind, iteration in zip(("rollouts", "samples"), newest):
            if iteration is None:
                continue
            folder = run.folder / kind / f"{iteration:06d}"
            entries = {entry["file"]: entry for entry in run.scores[folder] if entry["file"]}
            entries = {name: each for name, each in entries.items() if (folder / name).is_file()}
            known = [each["reward"] for each in entries.values() if each["reward"] is not None]
            if len(known) < 2:
                continue
            limit = CODEC * pstdev(known) + LEAST
            with TemporaryDirectory() as scratch:
                command = ["-m", "scripts.evaluate", "--config", run.folder / "config.yaml"]
                command += ["--videos", folder, "--output_dir", Path(scratch) / "scores"]
                if (
                    kind == "rollouts"
                ):  # evaluate reduces enlarged videos to the size of a validation
                    command += ["--validation_height", run.get("height")]
                    command += ["--validation_width", run.get("width")]
                _run(command)
                scored = json.loads((Path(scratch) / "scores" / "scores.json").read_text())
            for found in scored["videos"]:
                entry = entries[Path(found["file"]).name]
                where = f"{kind}/{iteration:06d}/{entry['file']}"
                rows.equal(f"prompt of {where}", entry["prompt"], found["prompt"])
                if entry["reward"] is not None:
                    rows.small(where, abs(entry["reward"] - found["reward"]), limit)


def audit_samples(run: Run, audit: Audit) -> None:
    """Sample the videos of the newest validation again, from its checkpoint and from an export."""
    iterations = [i for i in run.validations if i in run.checkpoints]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = "scripts.evaluate of the checkpoint has the rewards of the validation"
        with audit.compare(TOPIC, text, "samples/, checkpoints/", 1e-4) as rows:
            iteration = _newest(iterations)
            checkpoint = run.checkpoints[iteration]
            _run(
                ["-m", "scripts.evaluate", "--checkpoint_path", checkpoint]
                + ["--output_dir", folder / "evaluation"]
            )
            scored = json.loads((folder / "evaluation" / "scores.json").read_text())
            entries = run.validations[iteration]
            rows.equal("number of videos", len(entries), len(scored["videos"]))
            for entry, found in zip(entries, scored["videos"]):
                rows.number(f"video {entry['number']}", entry["reward"], found["reward"])
        text = "generate.py makes the validation's videos from the checkpoint"
        with audit.compare(TOPIC, text, "samples/, *.mp4, checkpoints/") as rows:
            checkpoint = run.checkpoints[_newest(iterations)]
            _generate(run, folder / "videos", "--checkpoint_path", checkpoint)
            _compare(run, rows, _newest(iterations), folder / "videos")
        text = "generate.py makes them from what scripts.export writes of the checkpoint"
        with audit.compare(TOPIC, text, "samples/, *.mp4, checkpoints/") as rows:
            checkpoint = run.checkpoints[_newest(iterations)]
            _run(
                ["-m", "scripts.export", "--checkpoint_path", checkpoint]
                + ["--output_dir", folder / "export"]
            )
            is_lora = any((folder / "export").glob("*.safetensors"))
            source = "--lora_path" if is_lora else "--checkpoint_path"
            _generate(run, folder / "exported", source, folder / "export")
            _compare(run, rows, _newest(iterations), folder / "exported")


def _newest(iterations: list[int]) -> int:
    if not iterations:
        raise CannotCheck("no checkpoint is kept of an iteration that was validated")
    return max(iterations)


def _generate(run: Run, output: Path, *source: object) -> None:
    config = ["--config", run.folder / "config.yaml"]
    command = ["generate.py", *config, *source, "--initial_noise", "validation"]
    command += ["--seed", run.get("validation_seed", 930)]
    command += ["--num_videos", run.get("validation_repeats", 1)]
    command += ["--valid_video_csv", *run.paths("valid_video_csv"), "--output_path", output]
    _run(command)


def _compare(run: Run, rows, iteration: int, made: Path) -> None:
    """Compare the saved videos of a validation with those that were made again."""
    for entry in run.validations[iteration]:
        saved = run.folder / "samples" / f"{iteration:06d}" / str(entry["file"])
        if entry["file"] and saved.is_file():
            again = made / f"{entry['number']:04d}.mp4"
            rows.small(str(entry["file"]), _difference(saved, again), PIXELS)
    if not rows.count:
        raise CannotCheck("the run has saved no validation videos")


def _difference(first: Path, second: Path) -> float:
    """Return the mean absolute difference of two videos, in levels of 255."""
    import numpy as np

    videos = [_frames(path) for path in (first, second)]
    if videos[0].shape != videos[1].shape:
        return float("inf")
    return float(np.abs(videos[0] - videos[1]).mean())


def _frames(path: Path):
    import av
    import numpy as np

    with av.open(str(path)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return np.stack(frames).astype(np.float32)


def _run(words: list[object]) -> None:
    """Run a public command. Raises CannotCheck if it fails."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise CannotCheck(
            f"{shlex.join(command[1:3])} ended with {done.returncode}: {''.join(last)}"
        )
