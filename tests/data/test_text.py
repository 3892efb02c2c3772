"""Tests of aligned rows and of the forms of numbers."""

from hyvideo.data.text import counted, labelled, lines_of, number


def test_texts_of_rows_are_aligned_and_only_the_first_row_has_the_label():
    rows = [
        *labelled("attention", ["flash3 kernel", "not cudnn: too old"]),
        ("output", "outputs/run"),
    ]
    assert lines_of(rows, width=11) == [
        "attention  flash3 kernel",
        "           not cudnn: too old",
        "output     outputs/run",
    ]
    assert {line.index(text) for line, (_, text) in zip(lines_of(rows), rows)} == {23}


def test_nothing_to_list_has_no_row():
    assert labelled("warning", []) == []


def test_large_numbers_keep_all_integer_digits():
    assert [number(value) for value in (0, 1, 99.96, 100, 1e6)] == [
        "0",
        "1",
        "100",
        "100",
        "1,000,000",
    ]


def test_only_a_count_of_one_is_in_the_singular():
    assert [counted(count, "video") for count in (0, 1, 1200)] == [
        "0 videos",
        "1 video",
        "1,200 videos",
    ]
