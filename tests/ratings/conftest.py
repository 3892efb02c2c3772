"""A small study of three methods, and answers of simulated raters."""

import json
import shutil

import numpy as np
import pytest
import torch

from hyvideo.data.videos import write_video
from hyvideo.ratings.rating import Study
from hyvideo.ratings.study import clips_of, make_study

METHODS = ("ours_zq7", "flow_zq8", "dance_zq9")
PROMPTS = [
    "a red circle",
    'a "blue" square </script><script>document.title = "hacked"</script>',
    "A star",
    "a star",
]


def write_folder(folder, prompts=PROMPTS, colour=0, name="clip_{}"):
    """Write a folder of videos with JSON files like generate.py."""
    folder.mkdir(parents=True)
    for number, prompt in enumerate(prompts):
        path = folder / f"{name.format(number)}.mp4"
        write_video(
            path, torch.full((8, 3, 16, 16), 60 + 40 * colour + 5 * number, dtype=torch.uint8), 8
        )
        path.with_suffix(".json").write_text(json.dumps({"prompt": prompt, "seed": 3}))
    return folder


def waiting(study, token):
    """Return the pairs on the rater's page that have no answer yet."""
    state = study.page(token).partition('id="state">')[2].partition("</script>")[0]
    return json.loads(state)["pairs"]


def content(study, token, pair, answer):
    """Return what the page sends if a rater gives the same answer to all questions of a pair."""
    return {"token": token, "answers": {pair: dict.fromkeys(study.questions, answer)}}


def add(study, *given):
    study.add(json.dumps(content(study, *given)).encode())


def clips_in(folders):
    return {name: clips_of(folder, []) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("methods")
    made = {name: write_folder(root / name, colour=colour) for colour, name in enumerate(METHODS)}
    return made


@pytest.fixture(scope="session")
def made(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "study"
    make_study(folder, clips_in(folders), raters=4, pairs=8, seed=0)
    return folder


@pytest.fixture
def study(made, tmp_path):
    return Study(shutil.copytree(made, tmp_path / "study"))


@pytest.fixture
def answer_all(study):
    """Answers all pairs of all raters with ``prefer(name of the rater, key entry of the pair) ->
    answer``.
    """
    key = json.loads((study.folder / "key.json").read_text())["pairs"]

    def answer(prefer):
        for token, rater in study.raters.items():
            for pair in rater["pairs"]:
                add(study, token, pair, prefer(rater["name"], key[pair]))

    return answer


@pytest.fixture
def random():
    return np.random.default_rng(0)
