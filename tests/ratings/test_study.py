"""Balance of designs; files of a study do not reveal the method."""

import json
import shutil
from collections import Counter
from pathlib import Path

import av
import pytest

from hyvideo.data.videos import read_video, write_video
from hyvideo.ratings.study import design, make_study, two_sides
from hyvideo.validation.video_folder import find_clips
from tests.ratings.conftest import METHODS, clips_in, write_folder

SIZES = [(2, 12, 10, 12), (3, 12, 29, 20), (4, 32, 29, 20), (3, 7, 5, 21), (2, 5, 1, 3)]


def spread(counts):
    return max(counts) - min(counts)


@pytest.mark.parametrize("methods, units, raters, pairs", SIZES)
def test_a_design_is_balanced_over_methods_prompts_and_sides(methods, units, raters, pairs):
    designed = design(methods, units, raters=raters, pairs=pairs, seed=4)
    cells = [[(unit, *sorted(sides)) for unit, *sides in screens] for screens in designed]
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
    designed = design(2, 12, raters=6, pairs=12, seed=1)
    assert len({tuple(unit for unit, *_ in screens) for screens in designed}) == 6
    sides = [tuple(first for _, first, _ in screens) for screens in designed]
    assert len(set(sides)) == 6
    assert sum(a != b for row in sides for a, b in zip(row, row[1:])) < 0.8 * 66, (
        "sides must not alternate"
    )


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
    make_study(tmp_path / "study", clips_in(methods), raters=4, pairs=8, seed=0)
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


def test_folders_are_compared_on_their_common_prompts(folders, tmp_path):
    fewer = write_folder(tmp_path / "fewer", ["a star", "a dog", "a red circle"], name="x{}")
    sizes = {"raters": 1, "pairs": 2}
    make_study(tmp_path / "study", clips_in({"ours": folders[METHODS[0]], "fewer": fewer}), **sizes)
    pairs = json.loads((tmp_path / "study/key.json").read_text())["pairs"].values()
    assert {pair["prompt"] for pair in pairs} == {"a star", "a red circle"}
    strange = write_folder(tmp_path / "strange", ["a dog"])
    for given in ({"ours": folders[METHODS[0]], "strange": strange}, {"ours": fewer}):
        with pytest.raises(ValueError, match=f"for {len(given)} methods with"):
            make_study(tmp_path / "none", clips_in(given), **sizes)
    assert not (tmp_path / "none").exists()


def test_videos_of_a_prompt_and_first_frame_are_compared_two_by_two(tmp_path):
    folder = write_folder(tmp_path / "made", ["a star"] * 7 + ["a dog"])
    first = {"image": str(tmp_path / "a.png")}
    both = first | {"last_image": str(tmp_path / "b.png")}
    for number, images in {0: first, 3: first, 5: both, 6: both}.items():
        path = folder / f"clip_{number}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | images))
    sides = two_sides(find_clips(folder, []))
    pairs = [
        (sides["even"][unit].path.stem, sides["odd"][unit].path.stem) for unit in sides["even"]
    ]
    assert pairs == [("clip_0", "clip_3"), ("clip_1", "clip_2"), ("clip_5", "clip_6")]
    make_study(tmp_path / "study", sides, raters=1, pairs=3)
    key = json.loads((tmp_path / "study/key.json").read_text())["pairs"].values()
    images = {
        pair["unit"]: (pair.get("ref_image_path"), pair.get("ref_last_image_path")) for pair in key
    }
    one, other = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    assert images == {0: (one, None), 1: (None, None), 2: (one, other)}
