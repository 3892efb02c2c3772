"""Tests of the reader of YAML files that users write."""

import pytest

from hyvideo.files.yaml_files import read_yaml


@pytest.fixture
def write(tmp_path):
    def write_file(text: str):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write_file


def test_numbers_are_decimal_and_dates_are_text(write):
    content = read_yaml(write("a: 1e-5\nb: 010\nc: 2026-01-01\nd: 1:30\ne: on\nf: 7\n"))
    assert content == {"a": 1e-5, "b": "010", "c": "2026-01-01", "d": "1:30", "e": True, "f": 7}


def test_anchors_aliases_and_merged_mappings_are_read(write):
    text = "base: &base {eta: 0.5, seed: 1}\nagain: *base\nchanged:\n  <<: *base\n  seed: 2\n"
    base = {"eta": 0.5, "seed": 1}
    assert read_yaml(write(text)) == {"base": base, "again": base, "changed": base | {"seed": 2}}
    # a merged mapping that merges another one
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\n<<: *b\n"
    assert read_yaml(write(text)) == {"a": {"x": 1}, "b": {"x": 2}, "x": 2}


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "b: [{1: 1, 1: 2}]\n"])
def test_a_repeated_name_is_rejected(write, text):
    with pytest.raises(ValueError, match="settings.yaml.* repeats"):
        read_yaml(write(text))
