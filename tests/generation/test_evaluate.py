"""scripts/evaluate.py: scores of a model, a checkpoint and a folder of videos."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.data.videos import write_video
from hyvideo.generation.generation import Source
from hyvideo.generation.policy_scores import Evaluator
from hyvideo.rewards.rewards import Scorer
from hyvideo.settings.command_line import load_config
from hyvideo.training.rewards import make_async_scorer
from hyvideo.validation import parts, video_folder
from hyvideo.validation.scores_file import Evaluation, as_text, summarise
from hyvideo.validation.validation import Validation
from hyvideo.validation.video_folder import find_clips, read_clips
from scripts import evaluate
from tests.live_tensors import LiveTensors

CSV = "assets/miniature/prompts/smoke.csv"


@pytest.fixture
def score(exit_code, tmp_path, tiny_config):
    def run(*flags, out="scores"):
        common = [
            "--config",
            "configs/miniature.yaml",
            "--num_threads",
            "1",
            "--output_dir",
            tmp_path / out,
        ]
        code = exit_code(evaluate.main, *common, *flags)
        file = tmp_path / out / "scores.json"
        return code, json.loads(file.read_text()) if file.is_file() else None

    return run


def clip(shade):
    return torch.full((5, 3, 32, 32), shade, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(4):
        write_video(videos / f"{number:04d}.mp4", clip(40 * number), 8)
    return videos


@pytest.mark.system
def test_the_base_model_and_its_transformer_as_checkpoint_have_equal_scores(score, tmp_path):
    flags = [
        "--valid_video_csv",
        CSV,
        "--validation_steps",
        "2",
        "--validation_repeats",
        "1",
        "--reward_model",
    ]
    code, base = score(*flags, "miniature")
    assert code == 0 and len(base["videos"]) == 8
    assert (
        0
        < base["summary"]["VQ"]["low"]
        <= base["summary"]["VQ"]["mean"]
        <= base["summary"]["VQ"]["high"]
    )
    assert {"Overall", "reward", "all_correct", "frechet_distance"} <= base["summary"].keys()
    rows = list(csv.DictReader((tmp_path / "scores/scores.csv").open(encoding="utf-8")))
    assert [float(row["VQ"]) for row in rows] == [video["VQ"] for video in base["videos"]]
    code, same = score(
        *flags,
        "miniature",
        "--checkpoint_path",
        "assets/miniature/transformer/miniature",
        out="same",
    )
    assert code == 0 and same["videos"] == base["videos"] and same["measures"] == base["measures"]


def test_a_repeated_evaluation_samples_only_the_videos_that_are_missing(
    score, tmp_path, monkeypatch
):
    flags = ["--valid_video_csv", CSV, "--validation_steps", "1", "--validation_repeats", "1"]
    flags += ["--validation_batch_size", "2", "--reward_model", "miniature"]
    flags += ["--sample_n_frames", "5", "--height", "16", "--width", "16"]
    sample, sampled = Validation.sample, []

    def stopped(self, conditions, noise, rows):
        if len(sampled) == 2:
            raise KeyboardInterrupt
        sampled.append(rows)
        return sample(self, conditions, noise, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "sample", stopped)
        with pytest.raises(KeyboardInterrupt):
            score(*flags)
    assert not (tmp_path / "scores/scores.json").exists()
    monkeypatch.setattr(
        Validation, "sample", lambda *rest: sampled.append(rest[-1]) or sample(*rest)
    )
    code, found = score(*flags)
    assert code == 0 and sampled == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(path.name for path in (tmp_path / "scores").iterdir()) == [
        "scores.csv",
        "scores.json",
    ]
    assert score(*flags, out="again")[1]["videos"] == found["videos"]


def test_a_given_source_replaces_the_lora_that_runs_start_from(tmp_path):
    assert Source().with_initial_lora("") == Source()
    assert Source().with_initial_lora("start") == Source(lora=Path("start"))
    for given in (Source(checkpoint=tmp_path), Source(lora=tmp_path, lora_scale=0.5)):
        assert given.with_initial_lora("start") == given


@pytest.fixture
def trained(tmp_path):
    """The miniature's transformer as checkpoint of a run."""
    folder = tmp_path / "trained"
    shutil.copytree("assets/miniature/transformer/miniature", folder)
    (folder / "state.json").write_text('{"settings": {}}')
    return folder


def test_a_checkpoint_uses_the_settings_of_its_run_without_a_config(
    trained, tmp_path, monkeypatch, capsys
):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    config, checkpoint = (
        tmp_path / "run/config.yaml",
        trained.rename(tmp_path / "run/checkpoints/000003"),
    )
    text = Path("configs/miniature.yaml").read_text()
    assert "reward_weights" not in text  # the default
    config.write_text(f"{text}\nreward_weights: of_the_run\n")

    def output_of(*flags):
        flags = ["--checkpoint_path", checkpoint, "--output_dir", tmp_path / "scores", *flags]
        monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, flags)])
        with pytest.raises(SystemExit, match="2"):
            evaluate.main()
        return "".join(capsys.readouterr())

    note = f"using the settings of {config}"
    assert note in (error := output_of()) and "of_the_run" in error
    assert "of_the_run" not in output_of("--reward_weights", "of_a_flag")
    assert note not in (
        error := output_of("--config=configs/smoke.yaml", "--reward_model", "clip", "clip")
    )
    assert "each scorer once" in error


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--output_dir README.md/x", "README.md/x"),
        ("--validation_height 33 --validation_width 32", "height must be a multiple of 8, got 33"),
    ],
)
def test_invalid_flags_are_reported_before_scorers_are_loaded(
    score, trained, tmp_path, capsys, flags, message
):
    """The scorer's files are missing, which would be reported if scorers were loaded first."""
    (tmp_path / "first.png").write_text("no image")
    (tmp_path / "images.csv").write_text("prompt,ref_image_path\na,first.png\n")
    words = flags.format(trained=trained, images=tmp_path / "images.csv").split()
    code, scores = score("--valid_video_csv", CSV, "--reward_model", "clip", *words)
    error = capsys.readouterr().err
    assert code == 2 and scores is None and message in error and "clip-vit" not in error


def test_true_rewards_are_recorded_beside_learned_scores(score):
    """Table 2 computes its column of the true reward from them."""
    flags = ["--valid_video_csv", CSV, "--validation_steps", "1", "--validation_repeats", "1"]
    _, scores = score(*flags, "--reward_model", "miniature_videoalign")
    assert all(
        {"true/VQ", "true/MQ", "true/TA", "all_correct"} <= entry.keys()
        for entry in scores["videos"]
    )
    assert all(
        entry[f"true/{name}"] is not None
        for entry in scores["videos"]
        for name in ("VQ", "MQ", "TA")
    )


def test_videos_are_scored_with_prompts_from_their_json_files(score, folder):
    prompt = "a red circle moves up"
    for path in folder.glob("*.mp4"):
        path.with_suffix(".json").write_text(json.dumps({"prompt": prompt}))
    code, scores = score("--videos", folder, "--reward_model", "miniature")
    assert code == 0
    assert [v["file"] for v in scores["videos"]] == ["0000.mp4", "0001.mp4", "0002.mp4", "0003.mp4"]
    assert {v["prompt"] for v in scores["videos"]} == {prompt} and {
        v["group"] for v in scores["videos"]
    } == {0}


def test_without_json_files_prompts_are_the_rows_in_order(folder):
    clips = find_clips(folder, [Request("one"), Request("two")])
    assert [(c.prompt, c.group) for c in clips] == [("one", 0), ("one", 0), ("two", 1), ("two", 1)]
    with pytest.raises(
        ValueError,
        match="valid_video_csv",
    ):
        find_clips(folder, [Request("x")] * 3)
    (folder / "0000.json").write_text('{"prompt": "one"}')
    with pytest.raises(ValueError, match="0001.json"):
        find_clips(folder, [Request("x")])


def touch(folder, names):
    for name in names:
        (folder / name).touch()
    return folder


def pairs_of(folder, prompts):
    return {c.path.name: c.prompt for c in find_clips(folder, [Request(each) for each in prompts])}


def test_numbered_videos_have_the_prompts_of_their_numbers(tmp_path, capfd):
    """10.mp4 was scored with the prompt of 2.mp4; the first and the last pair are printed."""
    prompts = [f"prompt {number}" for number in range(1, 12)]
    touch(tmp_path, [f"{number}.mp4" for number in range(1, 12)])
    assert pairs_of(tmp_path, prompts) == {f"{n}.mp4": f"prompt {n}" for n in range(1, 12)}
    printed = capfd.readouterr().err
    assert "1.mp4 'prompt 1' to 11.mp4 'prompt 11'" in printed


@pytest.mark.parametrize(
    "form", ["{row}_{sample}.mp4", "sample{sample}_prompt{row}.mov", "{row}-seed{sample}.webm"]
)
def test_one_number_in_the_names_is_that_of_the_row(tmp_path, form):
    rows, samples = (9, 10, 11), (1, 2)
    names = {form.format(row=r, sample=s): f"row {r}" for r in rows for s in samples}
    touch(tmp_path, names)
    assert pairs_of(tmp_path, [f"row {row}" for row in rows]) == names


def test_videos_whose_names_are_prompts_have_these_in_any_order(tmp_path):
    """VBench's names, numbers before or behind, and names that are cut."""
    long = "a very long prompt, in which a red kite flies over a beach at dawn"
    names = {
        "zebra-0.mp4": "zebra",
        "zebra-1.mp4": "zebra",
        "A cat jumps, twice_10.mp4": "a cat jumps, twice",
        "003_a_very_long_prompt_in_which_a_red.mp4": long,
    }
    touch(tmp_path, names)
    assert pairs_of(tmp_path, ["zebra", long, "a cat jumps, twice"]) == names
    touch(tmp_path, ["other.mp4"])
    with pytest.raises(ValueError, match="other.mp4"):
        pairs_of(tmp_path, ["zebra", long, "a cat jumps, twice"])


def test_captions_of_a_folder_are_the_prompts_of_its_videos(tmp_path):
    """scripts.evaluate and scripts.rate read what objective sft reads."""
    touch(tmp_path, ["b.mp4", "a.mp4", "c.mp4"])
    for name, caption in {"a": "one", "b": "two", "c": "one"}.items():
        (tmp_path / f"{name}.txt").write_text(caption)
    clips = find_clips(tmp_path, [Request("other")])
    assert [(c.path.name, c.prompt, c.group) for c in clips] == [
        ("a.mp4", "one", 0),
        ("b.mp4", "two", 1),
        ("c.mp4", "one", 0),
    ]


@pytest.mark.parametrize(
    "name, values",
    {
        "checkpoint": (None, "run/checkpoints/000003"),
        "policy_hash": ("aa", "bb"),  # a checkpoint of the same path that was replaced
        "steps": (10, 50),
        "step_caching": (None, {"cache_type": "deepcache"}),
    }.items(),
)
def test_videos_of_several_policies_or_settings_raise_value_error(folder, name, values):
    for number in range(4):
        record = {"prompt": "one", "seed": number, "height": 32 + number, name: values[number == 2]}
        (folder / f"{number:04d}.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"{name} .*0000.mp4 .*0002.mp4"):
        find_clips(folder, [])
    (folder / "0002.mp4").unlink()
    assert [clip.seed for clip in find_clips(folder, [])] == [0, 1, 3]


def test_videos_of_a_run_have_the_prompts_of_its_scores_file(folder):
    entries = [
        {"file": "0003.mp4", "prompt": "three", "group": 5},
        {"file": None, "prompt": "x", "group": 6},
    ]
    (folder / "scores.json").write_text(json.dumps(entries))
    (clip,) = find_clips(folder, [])
    assert (clip.path, clip.prompt, clip.group) == (folder / "0003.mp4", "three", 5)


def test_enlarged_videos_are_read_at_their_original_size(folder):
    clips = find_clips(folder, [Request("x")])
    (videos,) = read_clips(clips, [8] * 4, 32, 32)
    assert [*videos] == [0, 1, 2, 3] and all(
        video.shape == (5, 3, 32, 32) for video in videos.values()
    )
    assert (videos[2].int() - clip(80).int()).abs().max() <= 2
    (videos,) = read_clips(clips, [8] * 4, 48, 48)
    # 48 would be stored as 288, so 256 is read as stored
    assert videos[0].shape == (5, 3, 256, 256)


def test_videos_are_scored_at_their_own_frame_rate_and_at_the_size_of_the_validation(tmp_path):
    config = load_config(
        "configs/miniature.yaml", num_threads=1, validation_height=16, validation_width=24
    )
    for number, fps in enumerate((12, 24, 24)):
        write_video(tmp_path / f"{number}.mp4", torch.zeros(5, 3, 16, 24, dtype=torch.uint8), fps)
        (tmp_path / f"{number}.json").write_text('{"prompt": "a red circle moves up"}')
    assert config.data.fps != 12 and config.sampling.size[1:] != (16, 24)

    class Given(Scorer):
        def score(self, videos, prompts, *, fps):
            return [{"VQ": fps, "MQ": video.shape[-2], "TA": video.shape[-1]} for video in videos]

    evaluator = Evaluator(config)
    evaluator.scorer = make_async_scorer(config, evaluator.device, {"given": Given()})
    entries = evaluator.folder(tmp_path).videos
    assert [[entry[name] for name in ("VQ", "MQ", "TA")] for entry in entries] == [
        [12, 16, 24],
        [24, 16, 24],
        [24, 16, 24],
    ]
    evaluator.close()


@pytest.mark.slow
def test_a_folder_of_many_videos_is_read_and_scored_in_parts(score, folder, monkeypatch):
    """As in a folder of VBench, which would fill 660 GiB; a part has three of these clips."""
    for number in range(4, 25):
        write_video(folder / f"{number:04d}.mp4", clip(10 * number), 8)
    for path in folder.glob("*.mp4"):
        path.with_suffix(".json").write_text(json.dumps({"prompt": "a red circle moves up"}))
    flags = ["--videos", folder, "--reward_model", "miniature"]
    code, whole = score(*flags, out="whole")
    assert code == 0 and len(whole["videos"]) == 25
    live, reduce = LiveTensors(), video_folder.at_original_size

    def counted(*args):
        video = reduce(*args)
        live.add([video])
        return video

    monkeypatch.setattr(video_folder, "at_original_size", counted)
    monkeypatch.setattr(parts, "PART_BYTES", 3 * clip(0).nbytes)
    code, found = score(*flags)
    assert code == 0 and len(live.references) == 25 and live.most == 3
    assert (found["videos"], found["measures"]) == (whole["videos"], whole["measures"])


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing"):
        find_clips(tmp_path / "nothing", [])


def test_a_summary_averages_by_prompt_and_skips_missing_scores():
    videos = [
        {"group": 0, "VQ": 1.0, "missing": False, "reason": None},
        {"group": 0, "VQ": 2.0, "missing": False, "reason": None},
        {"group": 1, "VQ": None, "missing": True, "reason": "broken"},
        {"group": 2, "VQ": 4.5, "missing": False, "reason": None},
    ]
    summary = summarise(Evaluation(videos, {"frechet_distance": 0.1, "VQ": 7.0}))
    assert summary["VQ"].mean == pytest.approx(3.0)
    # Student's t of two prompts, 1.5 and 4.5
    assert summary["VQ"].high == pytest.approx(3.0 + 12.7062 * 1.5)
    assert as_text(summary).split()[-2:] == ["frechet_distance", "0.1000"]
    assert summary["frechet_distance"].mean == 0.1
    assert list(summary) == ["VQ", "frechet_distance"]
