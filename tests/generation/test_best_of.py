"""generate.py --best_of: the candidate with the highest reward is kept, and all rewards are
recorded and shown.
"""

import json

import pytest
import torch

import generate
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.report.gallery import PAGE_FILE, find_videos
from tests.shallow import SHALLOW

PROMPTS = ["a red circle moves up", "a green square moves left"]
MODEL = ["--config", "configs/smoke.yaml", "--pretrained_model_root", SHALLOW, "--num_threads", "1"]
SCORER = """
from pathlib import Path

import torch

from hyvideo.rewards.rewards import Scorer

class Brightness(Scorer):
    dimensions = ("light",)
    def score(self, videos, prompts, *, fps):
        path = Path(__file__).with_name("candidates.pt")
        seen = torch.load(path) if path.is_file() else []
        torch.save([*seen, videos], path)
        return [{"light": video.float().mean().item()} for video in videos]

class HalfFailing(Scorer):  # no score for the first of the green candidates
    dimensions = ("light",)
    def score(self, videos, prompts, *, fps):
        scores = [1.0] * len(videos)
        if "green" in prompts[0]:
            scores[0] = float("nan")
        return [{"light": score} for score in scores]

class Failing(Scorer):  # no score for green videos while there is a file `dark`
    dimensions = ("light",)
    def score(self, videos, prompts, *, fps):
        if "green" in prompts[0] and Path(__file__).with_name("dark").exists():
            raise RuntimeError("it is dark")
        return [{"light": 1.0} for _ in videos]

class AlwaysFailing(Scorer):
    dimensions = ("light",)
    def score(self, videos, prompts, *, fps):
        raise RuntimeError("it is always dark")
"""


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """A function that runs generate.py and returns its exit code, the JSON files and stderr."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)

    def run(out, *flags, name="Brightness"):
        given = [word.replace("SCORER", f"{scorer}:{name}") for word in flags]
        where = tmp_path / out
        monkeypatch.setattr(
            "sys.argv", ["generate.py", *MODEL, "--output_path", str(where), *given]
        )
        code = generate.main()
        return (
            code,
            [json.loads(path.read_text()) for path in sorted(where.glob("*.json"))],
            capsys.readouterr().err,
        )

    return run


WORDS = ("--reward_model", "SCORER", "--reward_weights", '{"light": 1}')


@pytest.mark.system
def test_the_best_candidate_is_kept_and_all_scores_are_recorded(make, tmp_path):
    code, found, error = make("best", "--prompt", *PROMPTS, "--best_of", "3", *WORDS)
    assert code == 0, error
    alone = make("alone", "--prompt", *PROMPTS)[1]
    assert all("best_of" not in settings for settings in alone)
    candidates = torch.load(tmp_path / "candidates.pt")[-len(PROMPTS) :]  # after the trial
    for number, settings in enumerate(found):
        choice = settings["best_of"]
        totals = [entry["reward"] for entry in choice["rewards"]]
        assert choice["candidates"] == len(set(totals)) == 3 and totals[choice["chosen"]] == max(
            totals
        )
        assert [entry["scores"] for entry in choice["rewards"]] == [
            {"light": total} for total in totals
        ]
        kept = at_original_size(read_video(tmp_path / "best" / f"{number:04d}.mp4")[0], 16, 16)
        first = at_original_size(read_video(tmp_path / "alone" / f"{number:04d}.mp4")[0], 16, 16)
        distances = [(video.float() - kept.float()).square().mean() for video in candidates[number]]
        assert distances.index(min(distances)) == choice["chosen"]
        assert torch.equal(kept, first) == (choice["chosen"] == 0)
    shown = [video["ranking"] for video in find_videos(tmp_path / "best")]
    best = sorted((entry["reward"] for entry in found[0]["best_of"]["rewards"]), reverse=True)
    assert shown[0] == f"best of 3: {best[0]:.3f}, {best[1]:.3f}, {best[2]:.3f}"
    assert all(text in (tmp_path / "best" / PAGE_FILE).read_text() for text in shown)


def test_a_scorer_that_fails_is_reported_before_a_model_is_loaded(make, monkeypatch):
    monkeypatch.setattr(
        "hyvideo.loading.model_setup.load_encoder", lambda *_, **__: pytest.fail("loads the model")
    )
    flags = ["--prompt", PROMPTS[0], "--best_of", "2", "--reward_model", "SCORER"]
    weights = ["--reward_weights", '{"light": 1}']
    code, found, error = make("none", *flags, *weights, name="AlwaysFailing")
    assert code == 2 and not found and "it is always dark" in error
    code, found, error = make("none", *flags, "--reward_weights", '{"dark": 1}')
    assert code == 2 and not found and "dark" in error


@pytest.mark.system
def test_a_failed_score_keeps_the_first_candidate_and_a_repeat_makes_that_video_again(
    make, tmp_path
):
    flags = ["--prompt", *PROMPTS, "--best_of", "2", *WORDS]
    (tmp_path / "dark").touch()
    code, (red, green), error = make("videos", *flags, name="Failing")
    assert code == 1 and "0001.mp4: " in error and "0000.mp4: " not in error
    assert red["problem"] is None
    assert green["best_of"]["chosen"] == 0 and "it is dark" in green["problem"]
    (tmp_path / "dark").unlink()
    first, second = (tmp_path / "videos" / f"000{number}.mp4" for number in (0, 1))
    before = first.stat().st_mtime_ns, second.stat().st_mtime_ns
    code, (red, green), error = make("videos", *flags, name="Failing")
    assert code == 0 and green["problem"] is None, error
    assert first.stat().st_mtime_ns == before[0] and second.stat().st_mtime_ns > before[1]


@pytest.mark.system
def test_a_candidate_without_a_score_is_not_kept_and_recorded_as_null(make, tmp_path):
    code, (_, found), error = make(
        "half", "--prompt", *PROMPTS, "--best_of", "2", *WORDS, name="HalfFailing"
    )
    assert code == 0, error
    choice = found["best_of"]
    assert choice["chosen"] == 1
    assert [entry["reward"] for entry in choice["rewards"]] == [None, 1.0]
    assert choice["rewards"][0]["scores"] == {"light": None}
    _, shown = find_videos(tmp_path / "half")
    assert shown["ranking"].startswith("best of 2")
