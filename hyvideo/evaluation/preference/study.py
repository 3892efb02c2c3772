"""A blind study of preference: pairs of clips for each rater, in files that do not tell which method made them.

<out>/study.json        questions, and each rater's pairs by invitation token: what the server reads
<out>/key.json          method, source and scores of every clip, and which pairs are checks: never served
<out>/videos/*.mp4      clips under names drawn from a secret, by one encoder, of one date
"""

import hashlib
import itertools
import math
import os
import secrets
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from hyvideo.config.rules import check_sampling
from hyvideo.data.outside import make_folder, parse_json
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import generator
from hyvideo.data.videos import read_video, write_video
from hyvideo.evaluation.figures.policies import PolicyComparison
from hyvideo.evaluation.scores_file import NOT_SCORES
from hyvideo.evaluation.video_folder import find_clips
from hyvideo.records.run_files import write_json

STUDY, KEY, VIDEOS = "study.json", "key.json", "videos"
DATE = 946_684_800  # seconds: of every clip, the first of January 2000
SIDES = ("first", "second")
QUESTIONS = {
    "VQ": "Visual quality: which clip is sharper, cleaner and more natural?",
    "MQ": "Motion quality: in which clip is the motion smoother and more plausible?",
    "TA": "Text alignment: which clip shows better what the text says?",
    "Overall": "Overall: which clip do you prefer?",
}


@dataclass(frozen=True)
class Plan:
    """Sizes of a study. Names and tokens are secret and always new, whatever the seed."""

    raters: int = field(default=10, metadata={"help": "people who are invited"})
    pairs: int = field(default=20, metadata={"help": "pairs of each rater, beside the checks"})
    repeats: int = field(default=2, metadata={"help": "of them, pairs that come again with sides exchanged"})
    identical: int = field(default=2, metadata={"help": "clips beside themselves, of each rater"})
    study_seed: int = field(default=0, metadata={"help": "decides pairs, sides and order"})


class Screen(NamedTuple):
    """Two clips that a rater sees at a time, of methods by number and of one unit (prompt and seed)."""

    kind: str  # "pair", "repeat" or "identical"
    unit: int
    first: int
    second: int


def design(plan: Plan, num_methods: int, num_units: int) -> list[list[Screen]]:
    """Screens of each rater in order. Raises ValueError for a plan that cannot be filled.

    All pairs of methods and units stand in a circle, and each rater gets those after the rater before. Any stretch has
    every pair of methods as often as the others to within one, every unit to within two. A rater sees each of two
    methods on either side equally often, to within one.
    """
    versus = list(itertools.combinations(range(num_methods), 2))
    circle, lap, half = len(versus) * num_units, math.lcm(len(versus), num_units), plan.pairs // 2
    bounds = {"raters": (1, 10_000), "pairs": (1, circle), "repeats": (0, half), "identical": (0, plan.pairs)}
    for name, (least, most) in bounds.items():
        if not least <= getattr(plan, name) <= most:
            raise ValueError(f"--{name} must be from {least} to {most:,} for these videos, got {getattr(plan, name)}")
    units = generator(plan.study_seed, "preference study").permutation(num_units).tolist()
    raters = []
    for rater in range(plan.raters):
        random = generator(plan.study_seed, "preference study", rater)
        turned, screens = random.integers(2, size=len(versus)), []
        for place in (random.permutation(plan.pairs) + rater * plan.pairs) % circle:
            number, unit = place % len(versus), units[(place + place // lap) % num_units]
            turned[number] += 1
            screens.append(Screen("pair", unit, *versus[number][:: 1 if turned[number] % 2 else -1]))
        random.shuffle(screens)  # or sides would alternate
        selves = [Screen("identical", s.unit, s.first, s.first) for s in screens[: plan.identical]]
        for again in random.permutation(half)[: plan.repeats]:  # of the first half, in the second
            _, unit, first, second = screens[again]
            screens.insert(random.integers(half + 1, len(screens) + 1), Screen("repeat", unit, second, first))
        for screen in selves:
            screens.insert(random.integers(1, len(screens) + 1), screen)
        raters.append(screens)
    return raters


def folders_of_methods(comparison: PolicyComparison) -> dict[str, Path]:
    """Folders of videos by method; the methods that are policies make theirs now, in one process."""
    sources, out = comparison.policies, comparison.out
    folders = {name: s.checkpoint for name, s in sources.items() if s.checkpoint and any(s.checkpoint.glob("*.mp4"))}
    policies = replace(comparison, policies={name: sources[name] for name in sources if name not in folders})
    if policies.policies:
        check_sampling(comparison.config, output=out)
        policies.check()
        policies.make()
    return {name: folders.get(name, out / name) for name in sources}


def make_study(out: Path, folders: dict[str, Path], requests: list[Request], plan: Plan) -> dict[str, str]:
    """Writes a study of folders of videos by the name of their method; gives the raters' tokens by their names.

    Methods are compared on the videos that all have: of the same prompt, and of the same place among those of it.

    Raises ValueError for fewer than two folders, or without common prompts, and for an ``out`` that has a study.
    """
    clips = [_clips_by_unit(folder, requests) for folder in folders.values()]
    units = [unit for unit in clips[0] if all(unit in others for others in clips)]
    if len(folders) < 2 or not units or (out / STUDY).exists():
        raise ValueError(
            f"a study needs two methods or more, prompts that all have (there are {len(units)}) and a folder without "
            f"a study, got {', '.join(folders)} and {out}"
        )
    salt, methods, served, key = secrets.token_bytes(32), list(folders), {}, {}
    scores = [_scores(folder) for folder in folders.values()]
    make_folder(out / VIDEOS)
    for number, screens in enumerate(design(plan, len(folders), len(units)), start=1):
        pairs = {}
        for place, screen in enumerate(screens):
            sides = screen.first, screen.second
            sources = [clips[method][units[screen.unit]] for method in sides]
            files = [f"{_opaque(salt, source)}.mp4" for source in sources]
            for source, file in zip(sources, (out / VIDEOS / name for name in files)):
                if not file.exists():
                    write_video(file, *read_video(source))
                    os.utime(file, (DATE, DATE))
            pair = _opaque(salt, number, place)
            pairs[pair] = {"prompt": units[screen.unit][0]} | dict(zip(SIDES, files))
            known = [scores[method].get(source.name, {}) for method, source in zip(sides, sources)]
            told = {"kind": screen.kind, "unit": screen.unit, "methods": sides, "scores": known}
            key[pair] = pairs[pair] | told | {"sources": [*map(str, sources)]}
        served[secrets.token_urlsafe(16)] = {"name": f"r{number:02d}", "pairs": pairs}
    write_json(out / KEY, {"plan": asdict(plan), "methods": methods, "pairs": key})
    write_json(out / STUDY, {"questions": QUESTIONS, "raters": served})
    return {rater["name"]: token for token, rater in served.items()}


def _clips_by_unit(folder: Path, requests: list[Request]) -> dict[tuple[str, int], Path]:
    """Videos by prompt and place among those of the prompt."""
    counts, found = Counter(), {}
    for clip in find_clips(folder, requests):
        found[clip.prompt, counts[clip.prompt]] = clip.path
        counts[clip.prompt] += 1
    return found


def _scores(folder: Path) -> dict[str, dict[str, float]]:
    """Numbers of a run's scores.json by name of the video's file; none where there is no such file."""
    path = folder / "scores.json"
    content = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else []
    entries = content["videos"] if isinstance(content, dict) else content
    return {e["file"]: {k: v for k, v in e.items() if isinstance(v, float) and k not in NOT_SCORES} for e in entries}


def _opaque(salt: bytes, *what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), key=salt, digest_size=10).hexdigest()
