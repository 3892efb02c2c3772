"""A folder of scripts.improve: seeds and guidance of the videos of each round, their scores, and
what each round trains on.
"""

import json
from pathlib import Path

from scripts.audit.run import Run, read_csv, read_table
from scripts.audit.statements import Audit

TOPIC = "Improvement"
PLAN = "improve.json"


def audit_improvement(folder: Path, audit: Audit) -> list[Path]:
    """Record the statements about the rounds and return the folders of their runs."""
    plan = json.loads((folder / PLAN).read_text())
    rounds = sorted(folder.glob("round*"), key=lambda path: int(path.name.removeprefix("round")))
    records = {
        int(path.name.removeprefix("round")): [
            json.loads(file.read_text()) | {"file": file.with_suffix(".mp4").name}
            for file in sorted((path / "videos").glob("*.json"))
        ]
        for path in rounds
    }
    _audit_samples(plan, records, audit)
    _audit_scores(folder, records, audit)
    text = "a round trains on the videos of its own scores"
    with audit.compare(TOPIC, text, "round*/run/config.yaml") as rows:
        for path in rounds:
            if (path / "run" / "config.yaml").is_file():
                given = Run(path / "run").get("videos_csv")
                found = ["/".join(Path(each).parts[-3:]) for each in given]
                chosen = "rated" if plan["rate"] else "scores"
                rows.equal(path.name, [f"{path.name}/{chosen}/videos.csv"], found)
    return [path / "run" for path in rounds if (path / "run" / "config.yaml").is_file()]


def _audit_samples(plan: dict, records: dict[int, list[dict]], audit: Audit) -> None:
    text = "each round samples each prompt as often as asked, by its own seed and guidance"
    with audit.compare(TOPIC, text, f"{PLAN}, round*/videos/") as rows:
        seeds = set()
        for number, videos in records.items():
            prompts = [
                row["prompt"].strip()
                for path in plan["prompts_csv"]
                for row in read_table(Path(path), "prompt")
            ]
            expected = [prompt for prompt in prompts for _ in range(plan["num_videos"])]
            rows.equal(
                f"prompts of round {number}", expected, [video["prompt"] for video in videos]
            )
            seed = {plan["seed"] + number}
            rows.equal(f"seeds of round {number}", seed, {video["seed"] for video in videos})
            rows.equal(f"seeds of round {number} and earlier ones", set(), seeds & seed)
            seeds |= seed
            guidance = plan["guidance_scale"] if number == 1 else 1.0
            found = {video["guidance_scale"] for video in videos}
            rows.equal(f"guidance of round {number}", {guidance}, found)
            checkpoint = None
            if number > 1:
                last = f"{(number - 1) * plan['max_steps']:06d}"
                checkpoint = f"round{number - 1}/run/checkpoints/{last}"
            # without the folder, which may have another name by now
            found = {
                video["checkpoint"] and "/".join(Path(video["checkpoint"]).parts[-4:])
                for video in videos
            }
            rows.equal(f"checkpoint of round {number}", {checkpoint}, found)


def _audit_scores(folder: Path, records: dict[int, list[dict]], audit: Audit) -> None:
    text = "each score belongs to its video and prompt"
    with audit.compare(TOPIC, text, "round*/videos/, round*/scores/") as rows:
        for number, videos in records.items():
            scores = folder / f"round{number}" / "scores"
            if not (scores / "videos.csv").is_file():
                continue
            of_file = {
                Path(entry["file"]).name: entry
                for entry in json.loads((scores / "scores.json").read_text())["videos"]
            }
            prompts = {video["file"]: video["prompt"] for video in videos}
            written = read_csv(scores / "videos.csv")
            rows.equal(
                f"videos of round {number}", set(prompts), {Path(r["video"]).name for r in written}
            )
            for row in written:
                name = Path(row["video"]).name
                where = f"round {number}, {name}"
                rows.equal(f"prompt of {where}", prompts[name], row["prompt"])
                rows.equal(f"scored prompt of {where}", prompts[name], of_file[name]["prompt"])
                reward = of_file[name]["reward"]
                rows.number(
                    f"score of {where}", reward, float(row["score"]) if row["score"] else None
                )
