"""Rating of your own videos: what is asked for, the videos, the page, and the command that trains on
the answers.
"""

import os
import shlex
import sys
import threading
import webbrowser
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import token_urlsafe

import uvicorn

from hyvideo.data.examples import PAIRS_FILE, VIDEOS_FILE, Example, check_videos
from hyvideo.data.prompts import Request, read_requests
from hyvideo.data.video_files import ClipForm, read_header
from hyvideo.data.videos import read_clip, write_video
from hyvideo.files.files import ROOT, folder_problem, make_folder, publish, read_json
from hyvideo.files.http_guard import listen, make_server
from hyvideo.files.steps import changed, run
from hyvideo.files.text import quote
from hyvideo.ratings import keeping, rating
from hyvideo.ratings.analysis import Judgement, judgements, pairs_csv, read_key
from hyvideo.ratings.study import design, make_study, two_sides
from hyvideo.records.run_files import write_json
from hyvideo.settings.command_line import load_config
from hyvideo.validation.video_folder import Clip, find_clips, write_videos_csv

PLAN = "rate.json"
SAMPLED = "made"  # folder of sampled videos
CHANGED = "as_trained"  # folder of existing videos in the form of training videos
QUESTION = {"Overall": "Which video do you prefer?"}
STOP = 2  # seconds in which open connections end with the server


@dataclass(frozen=True)
class RatingPlan:
    """What a command asks for, and rate.json in its folder records. A repeated command asks for the
    same or for nothing. Paths are absolute.
    """

    keep: bool = False  # single videos, and not pairs
    videos: str = ""  # folder of existing videos; empty: they are sampled
    config: str = ""
    prompts_csv: list[str] = field(default_factory=list)
    num_videos: int | None = None  # per prompt
    questions: dict[str, str] = field(default_factory=dict)  # by name; empty: QUESTION
    raters: int = 1
    flags: list[str] = field(default_factory=list)  # of generate.py

    @property
    def samples(self) -> int:
        """Sampled videos per prompt."""
        return self.num_videos or (4 if self.keep else 2)

    @property
    def requests(self) -> list[Request]:
        return read_requests(*self.prompts_csv) if self.prompts_csv else []


@dataclass(frozen=True)
class Address:
    """Where the page is served."""

    host: str
    port: int
    opens_browser: bool


def continued(given: RatingPlan, folder: Path) -> RatingPlan:
    """Return the plan of a folder, in a new one the given plan. Raises ValueError for another plan
    than that of the folder, and for one that cannot be carried out.
    """
    file = folder / PLAN
    if file.is_file():
        found = RatingPlan(**read_json(file, "the study"))
        if given in (found, RatingPlan()):
            return found
        raise ValueError(
            f"{quote(folder)} has a study with other {', '.join(changed(file, asdict(given)))}; repeat its command or "
            "name the folder alone to continue, or choose another folder"
        )
    check(given)
    return given


def record(plan: RatingPlan, folder: Path) -> None:
    """Record the plan of a folder whose videos can be rated; before, another command may replace it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, asdict(plan))


def check(plan: RatingPlan) -> None:
    """Raise ValueError for a plan that cannot be carried out, before hours of sampling."""
    if not plan.videos and not plan.prompts_csv:
        raise ValueError(
            "there are no videos to rate: give --prompts_csv and --config to sample them, or "
            "--videos FOLDER"
        )
    if plan.videos and folder_problem(plan.videos):
        raise ValueError(
            f"--videos must be a folder with mp4 files, got {quote(plan.videos)}: "
            f"{folder_problem(plan.videos)}"
        )
    if plan.keep:
        if plan.questions or plan.raters > 1:
            raise ValueError(
                "--keep true shows single videos to one person; remove --questions and --raters, "
                "which are for pairs"
            )
    elif not plan.videos:
        if plan.samples < 2:
            raise ValueError(f"a pair needs --num_videos 2 or more, got {plan.samples}")
        pairs = len(plan.requests) * (plan.samples // 2)
        design(2, pairs, raters=plan.raters, pairs=pairs)


def videos_of(plan: RatingPlan, folder: Path) -> Path:
    """Return the folder of the videos, after sampling those that are missing.

    Raises SystemExit with the exit code of generate.py if it fails.
    """
    if plan.videos:
        return Path(plan.videos)
    made = folder / SAMPLED
    config = ["--config", plan.config] if plan.config else []
    code = run(
        [sys.executable, ROOT / "generate.py", *config, "--valid_video_csv", *plan.prompts_csv]
        + ["--num_videos", plan.samples, "--keep_latents", "true", "--output_path", made]
        + plan.flags
    )
    if code:
        print(f"sampling failed with exit code {code}; the same command continues", file=sys.stderr)
        raise SystemExit(code)
    return made


def clips_to_rate(plan: RatingPlan, folder: Path) -> list[Clip]:
    """Return the videos to rate. With a config, existing ones that it would change are replaced by
    copies in the form of its training videos, so that a person sees what the run trains on.

    Raises ValueError for a video that cannot be brought to this form.
    """
    clips = find_clips(videos_of(plan, folder), plan.requests, setting="--prompts_csv")
    if not plan.videos or not plan.config:
        return clips
    config = load_config(plan.config)
    form = ClipForm(*config.sampling.size, config.data.fps, config.data.fit)
    check_videos([Example(Request(c.prompt), (c.path,), c.path.name) for c in clips], form)
    copies = folder / CHANGED
    shown = []
    for clip in clips:
        path = clip.path
        if form.changes(read_header(path)):
            make_folder(copies)
            path = copies / f"{path.name}.mp4"
            if not path.is_file():
                write_video(path, read_clip(clip.path, form), form.fps)
        shown.append(replace(clip, path=path))
    return shown


def rate_pairs(plan: RatingPlan, folder: Path, address: Address) -> None:
    """Show pairs until all are rated; each answer writes pairs.csv."""
    if not (folder / rating.VIDEOS).is_dir():  # written last
        methods = two_sides(clips_to_rate(plan, folder))
        make_study(
            folder,
            methods,
            questions=plan.questions or QUESTION,
            raters=plan.raters,
            pairs=len(methods["even"]),
        )
    record(plan, folder)
    study = rating.Study(folder)
    study.require_videos()
    key = read_key(study)
    lock = threading.Lock()

    def after_answer() -> None:
        with lock:
            write_pairs(study, key)
        if not num_unrated(study):
            server.should_exit = True

    server = make_server(rating.create_app(study, after_answer))
    pages = {rater["name"]: token for token, rater in study.raters.items()}
    is_finished = not num_unrated(study) or serve(server, pages, address)
    print(pairs_summary(study, write_pairs(study, key)))
    print(next_command(plan, folder, "dpo"))
    if not is_finished:
        raise KeyboardInterrupt


def write_pairs(study: rating.Study, key: dict) -> list[Judgement]:
    """Write the answers to pairs.csv and return them."""
    given = judgements(study, key)
    with publish(study.folder / PAIRS_FILE) as temporary:
        temporary.write_text(pairs_csv(given), encoding="utf-8")
    return given


def num_unrated(study: rating.Study) -> int:
    pairs = sum(len(rater["pairs"]) for rater in study.raters.values())
    return pairs - len({row["pair"] for row in study.rows()})


def pairs_summary(study: rating.Study, given: list[Judgement]) -> str:
    """Return how far the study is, as a line."""
    ties = sum(j.value == 0.5 for j in given)
    return (
        f"\n{len(given)} answers in {study.folder / PAIRS_FILE}, {ties} of them ties; pairs not "
        f"rated yet: {num_unrated(study)}"
    )


def rate_single(plan: RatingPlan, folder: Path, address: Address) -> None:
    """Show single videos until the person finishes; each answer writes videos.csv."""
    path = folder / VIDEOS_FILE
    if not path.is_file():
        make_folder(folder)
        clips = clips_to_rate(plan, folder)
        write_videos_csv(path, clips, "keep", [""] * len(clips))
    record(plan, folder)
    kept = keeping.Keeping(path)

    def end() -> None:
        server.should_exit = True

    token = token_urlsafe(16)
    server = make_server(keeping.create_app(kept, token, end))
    is_finished = not kept.num_unanswered or serve(server, {"page": token}, address)
    print(
        f"\n{kept.answers.count(True)} of {len(kept.answers)} videos are kept in {path}; not "
        f"answered yet: {kept.num_unanswered}"
    )
    print(next_command(plan, folder, "sft"))
    if not is_finished:
        raise KeyboardInterrupt


def serve(server: uvicorn.Server, pages: dict[str, str], address: Address) -> bool:
    """Serve pages, by who opens them and their token; return whether the server was told to end, and
    not Ctrl-C pressed.
    """
    server.config.timeout_graceful_shutdown = STOP
    listener, url = listen(address.host, address.port)
    with suppress(KeyboardInterrupt), listener:
        for name, token in pages.items():
            print(f"{name} {url}/{token}/", flush=True)
        print("Ctrl-C ends the program; the same command continues.", flush=True)
        # Without a display, a text browser would take the terminal.
        has_display = sys.platform in ("darwin", "win32") or any(
            os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
        )
        if address.opens_browser and has_display:
            webbrowser.open(f"{url}/{next(iter(pages.values()))}/")
        server.run(sockets=[listener])
        return True
    return False


def next_command(plan: RatingPlan, folder: Path, objective: str) -> str:
    """Return the command that trains on the answers, as a line."""
    config = short(Path(plan.config)) if plan.config else "FILE.yaml"
    words = ["python", "post_train.py", "--config", config, "--objective", objective]
    if objective == "dpo":
        words += ["--pairs_csv", short(folder)]
    else:
        words += ["--videos_csv", short(folder), "--keep_fraction", "1"]
    return f"next: {shlex.join(words)}"


def short(path: Path) -> str:
    """Return an absolute path as it is written from the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
