"""Show what a run has changed: the shares of images with one to four quasars, and a moving picture.

    python -m examples.galaxies.results outputs/galaxies/sage [RUN ...] [--csv FILE] [--picture FILE]

The moving picture has the same noise before, in the middle of and after the training of the first run.
"""

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from statistics import fmean

from PIL import Image, ImageDraw

from hyvideo.data.videos import read_video
from hyvideo.files.yaml_files import read_yaml

COLUMNS = 6
SIDE = 144  # pixels of an image in the picture
MARGIN = 0.16  # of an image, which is dark and left out
LABEL = 24  # height of the line above the images
MILLISECONDS = 1500
REALISM = "validation/held_out/Realism/realism"
DIVERSITY = "validation/held_out/diversity"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--csv", type=Path, help="file for the numbers of all validations")
    parser.add_argument("--picture", type=Path, help="file for the moving picture, .webp")
    options = parser.parse_args()
    rows = [row for run in options.runs for row in validations(run)]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if options.picture:
        write_picture(options.runs[0], options.picture)


def validations(run: Path) -> list[dict]:
    """Return a row for each validation of a run: percentages of its images by the number of quasars
    in them, the reward of `Lenses`, realism, diversity, and whether the hacking monitor warns.

    The run has the name of its folder without the seed: `sage` for sage_1, and `improve` for
    improve_1/round1/run of scripts.improve.
    """
    seed = read_yaml(run / "config.yaml")["seed"]
    folder = run.parents[1] if run.name == "run" else run
    rows = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        if "validation/reward" not in metrics:
            continue
        iteration = metrics["iteration"]
        scores = json.loads((run / "samples" / f"{iteration:06}" / "scores.json").read_text())
        counts = Counter(int(score["images"]) for score in scores)
        shares = {str(number): round(100 * counts[number] / len(scores), 1) for number in range(5)}
        more = sum(count for number, count in counts.items() if number > 4)
        rows.append(
            {"run": folder.name.removesuffix(f"_{seed}"), "iteration": iteration, "seed": seed}
            | shares
            | {
                "more": round(100 * more / len(scores), 1),
                "reward": round(fmean(score["cross"] for score in scores), 4),
                "realism": round(metrics[REALISM], 4),
                "diversity": round(metrics[DIVERSITY], 5),
                "hacking": metrics.get("validation/hacking", ""),
            }
        )
    return rows


def write_picture(run: Path, file: Path) -> None:
    """Write a moving picture of the recorded validation images of a run."""
    frames = [sheet(folder) for folder in sorted((run / "samples").iterdir())]
    frames[0].save(
        file, save_all=True, append_images=frames[1:], duration=MILLISECONDS, loop=0, quality=80
    )


def sheet(folder: Path) -> Image.Image:
    """Return the images of a validation, with its iteration above them."""
    videos = [read_video(path)[0] for path in sorted(folder.glob("*.mp4"))]
    rows = -(-len(videos) // COLUMNS)
    picture = Image.new("RGB", (COLUMNS * SIDE, LABEL + rows * SIDE))
    ImageDraw.Draw(picture).text((6, 5), f"iteration {int(folder.name)}", fill="white")
    for number, video in enumerate(videos):
        image = Image.fromarray(video[0].permute(1, 2, 0).numpy())
        margin = round(MARGIN * image.width)
        inner = (margin, margin, image.width - margin, image.height - margin)
        image = image.resize((SIDE, SIDE), box=inner)
        row, column = divmod(number, COLUMNS)
        picture.paste(image, (column * SIDE, LABEL + row * SIDE))
    return picture


if __name__ == "__main__":
    main()
