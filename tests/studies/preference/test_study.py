"""Balance and attention checks of designs; files of a study do not reveal the method."""

import json
import shutil
from collections import Counter
from pathlib import Path

import av
import pytest
import torch

from hyvideo.data.examples import Example, check_latents
from hyvideo.data.prompts import Request
from hyvideo.data.videos import read_header, read_video, write_video
from hyvideo.training.video_latents import write_latents
from studies.preference.study import DATE, design, make_study
from tests.full_size import copy_distinct, write_full_size
from tests.studies.preference.conftest import METHODS, PROMPTS, write_folder

SIZES = [(2, 12, 10, 12), (3, 12, 29, 20), (4, 32, 29, 20), (3, 7, 5, 21), (2, 5, 1, 3)]


def spread(counts):
    return max(counts) - min(counts)


@pytest.mark.parametrize("methods, units, raters, pairs", SIZES)
def test_a_design_is_balanced_over_methods_prompts_and_sides(methods, units, raters, pairs):
    designed = design(methods, units, raters=raters, pairs=pairs, checks=0, seed=4)
    cells = [[(unit, *sorted(sides)) for _, unit, *sides in screens] for screens in designed]
    together = [cell for rater_cells in cells for cell in rater_cells]
    versus = Counter(cell[1:] for cell in together)
    assert (
        len(versus) == min(methods * (methods - 1) // 2, len(together))
        and spread(versus.values()) <= 1
    )
    assert spread([Counter(cell[0] for cell in together)[unit] for unit in range(units)]) <= 2
    assert spread(Counter(together).values()) <= 1
    for rater_cells, screens in zip(cells, designed):
        assert len(set(rater_cells)) == pairs
        assert spread(Counter(cell[1:] for cell in rater_cells).values()) <= 1
        assert sum(first < second for *_, first, second in screens) in (
            pairs // 2,
            (pairs + 1) // 2,
        )


def test_sides_and_order_differ_between_raters():
    designed = design(2, 12, raters=6, pairs=12, checks=0, seed=1)
    assert len({tuple(unit for _, unit, *_ in screens) for screens in designed}) == 6
    sides = [tuple(first for *_, first, _ in screens) for screens in designed]
    assert len(set(sides)) == 6
    assert sum(a != b for row in sides for a, b in zip(row, row[1:])) < 0.8 * 66, (
        "sides must not alternate"
    )


def test_repeats_come_after_their_pairs_with_sides_swapped():
    for screens in design(3, 12, raters=20, pairs=10, checks=3):
        assert Counter(kind for kind, *_ in screens) == {"pair": 10, "repeat": 3, "identical": 3}
        for place, (kind, unit, first, second) in enumerate(screens):
            if kind == "repeat":
                assert screens.index(("pair", unit, second, first)) < place - 1
            assert (first == second) == (kind == "identical")


@pytest.mark.parametrize("wrong", [{"raters": 0}, {"pairs": 0}, {"checks": -1}])
def test_impossible_sizes_raise_value_error(wrong):
    with pytest.raises(
        ValueError, match=f"--{next(iter(wrong))} must be from .* for 2 methods with 12 videos"
    ):
        design(2, 12, **({"raters": 2, "pairs": 12, "checks": 1} | wrong))


def test_latents_beside_the_videos_are_copied_with_them(folders, tmp_path):
    methods = {name: shutil.copytree(folders[name], tmp_path / name) for name in METHODS[:2]}
    for folder in methods.values():
        write_latents(folder / "clip_0.mp4", torch.ones(2, 3, 4, 5))
    make_study(tmp_path / "study", methods, [], raters=1, checks=0)
    copies = sorted((tmp_path / "study/videos").glob("*.safetensors"))
    assert len(copies) == 2 and {path.stat().st_mtime for path in copies} == {DATE}
    for path in copies:
        video = path.with_suffix(".mp4")
        pair = [Example(Request(PROMPTS[0]), (video, video), "row 1")]
        check_latents(pair, (3, 4, 5))


def test_only_the_key_reveals_the_method(study, folders):
    files = sorted((study.folder / "videos").iterdir())
    key = json.loads((study.folder / "key.json").read_text())
    assert len({file.stat().st_mtime for file in files}) == 1
    assert len(files) == 12
    for file in [*files, study.folder / "study.json"]:
        content = file.read_bytes()
        assert not [name for name in METHODS if name.encode() in content or name in file.name]
    assert key["methods"] == list(METHODS)
    pairs = key["pairs"].values()
    sources = {
        pair[side]: pair["sources"][number]
        for pair in pairs
        for number, side in enumerate(("first", "second"))
    }
    assert all((pair["kind"] == "identical") == (pair["first"] == pair["second"]) for pair in pairs)
    for file, source in sources.items():
        assert (study.folder / file).read_bytes() == Path(source).read_bytes()


@pytest.mark.slow
def test_all_videos_are_compressed_again_if_one_has_metadata(folders, tmp_path):
    """Otherwise its metadata, or that only its method's videos are compressed twice, would reveal
    the method.
    """
    methods = {name: shutil.copytree(folder, tmp_path / name) for name, folder in folders.items()}
    marked = methods[METHODS[1]] / "clip_2.mp4"
    with (
        av.open(str(folders[METHODS[1]] / "clip_2.mp4")) as source,
        av.open(str(marked), "w") as target,
    ):
        target.metadata["comment"] = f"made by {METHODS[1]}"
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    assert METHODS[1].encode() in marked.read_bytes()
    make_study(tmp_path / "study", methods, [], raters=4, pairs=8, checks=0, seed=0)
    pairs = json.loads((tmp_path / "study/key.json").read_text())["pairs"].values()
    sources = {
        pair[side]: pair["sources"][number]
        for pair in pairs
        for number, side in enumerate(("first", "second"))
    }
    assert str(marked) in sources.values()
    for file, source in sources.items():
        content = (tmp_path / "study" / file).read_bytes()
        assert METHODS[1].encode() not in content
        again, original = (read_video(path)[0] for path in (tmp_path / "study" / file, source))
        assert (again.int() - original.int()).abs().max() <= 2
        write_video(tmp_path / "again.mp4", *read_video(source))
        assert content == (tmp_path / "again.mp4").read_bytes()


def test_another_study_has_different_names_and_tokens(study, folders, tmp_path):
    make_study(tmp_path / "other", folders, [], raters=4, pairs=8, checks=0)
    other = json.loads((tmp_path / "other/study.json").read_text())
    assert not set(other["raters"]) & set(study.raters)
    orders = [
        [[pair["prompt"] for pair in r["pairs"].values()] for r in raters.values()]
        for raters in (other["raters"], study.raters)
    ]
    assert orders[0] != orders[1]
    assert not {p.name for p in (tmp_path / "other/videos").iterdir()} & {
        p.name for p in study.folder.glob("videos/*")
    }


def test_folders_are_compared_on_their_common_prompts(folders, tmp_path):
    fewer = write_folder(tmp_path / "fewer", ["a star", "a dog", "a red circle"], name="x{}")
    sizes = {"raters": 1, "pairs": 2, "checks": 0}
    make_study(tmp_path / "study", {"ours": folders[METHODS[0]], "fewer": fewer}, [], **sizes)
    pairs = json.loads((tmp_path / "study/key.json").read_text())["pairs"].values()
    assert {pair["prompt"] for pair in pairs} == {"a star", "a red circle"}
    strange = write_folder(tmp_path / "strange", ["a dog"])
    for given in ({"ours": folders[METHODS[0]], "strange": strange}, {"ours": fewer}):
        with pytest.raises(ValueError, match=f"for {len(given)} methods with"):
            make_study(tmp_path / "none", given, [], **sizes)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_study_of_full_size_videos_keeps_their_length_and_size(tmp_path, is_copied):
    clip = write_full_size(tmp_path / "clip.mp4", num_frames=121 if is_copied else 9)
    methods = {name: tmp_path / name for name in METHODS}
    for number, folder in enumerate(methods.values()):
        folder.mkdir()
        for unit in range(2):
            copy_distinct(clip, folder / f"{unit}.mp4", 10 * number + unit)
            (folder / f"{unit}.json").write_text(json.dumps({"prompt": f"prompt {unit}"}))
    if not is_copied:
        shutil.move(folder / "1.json", folder / "2.json")
        with av.open(str(clip)) as source, av.open(str(folder / "2.mp4"), "w") as target:
            target.metadata["comment"] = "x"
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in (packet for packet in source.demux(video=0) if packet.dts is not None):
                packet.stream = stream
                target.mux(packet)
        (folder / "1.mp4").unlink()
    make_study(tmp_path / "study", methods, [], raters=2, pairs=6, checks=1)
    files = [*(tmp_path / "study/videos").iterdir()]
    assert len(files) == 6 and {read_header(file) for file in files} == {read_header(clip)}
    assert (
        sum(file.stat().st_size for file in files) == 6 * (clip.stat().st_size + 16)
    ) == is_copied
