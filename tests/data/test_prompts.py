"""Tests of reading prompts and of their order over iterations."""

import hashlib
import json
from dataclasses import replace

import pytest

from hyvideo.data.prompts import (
    PromptOrder,
    Request,
    are_seen,
    hash_requests,
    read_requests,
    write_requests,
)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a prompts file and returns its path."""

    def write_file(content: str | bytes):
        path = tmp_path / "prompts.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


# --- reading -----------------------------------------------------------------------------------


def test_prompts_are_read_in_order_and_stripped(write):
    path = write('id,prompt\n1,"a red circle, moving"\n2,  a blue square \n3,"say ""hi"""\n')
    assert read_requests(path) == [
        Request(text) for text in ("a red circle, moving", "a blue square", 'say "hi"')
    ]
    assert read_requests(str(path)) == read_requests(path)


def test_prompts_may_contain_line_breaks_and_any_script(write):
    assert read_requests(write('prompt\n"two\nlines"\n一只猫\n')) == [
        Request("two\nlines"),
        Request("一只猫"),
    ]


def test_a_byte_order_mark_is_not_part_of_the_column_name(write):
    assert read_requests(write("\ufeffprompt\r\na cat\r\n")) == [Request("a cat")]


def test_shipped_files_are_found_from_any_folder_unless_a_local_file_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(read_requests("assets/prompts/train.csv")) == 256
    (tmp_path / "assets/prompts").mkdir(parents=True)
    (tmp_path / "assets/prompts/train.csv").write_text("prompt\na cat\n")
    assert read_requests("assets/prompts/train.csv") == [Request("a cat")]
    with pytest.raises(ValueError, match="file not found: README.md"):
        read_requests("README.md")


def test_blank_rows_are_left_out(write):
    for content in ("prompt,seed\na cat,1\n\n\n", "prompt,seed\na cat,1\n,\n , \n"):
        assert read_requests(write(content)) == [Request("a cat", seed=1)]


def test_every_row_needs_a_prompt(write):
    with pytest.raises(ValueError, match="row 2 of .*prompts.csv"):
        read_requests(write("id,prompt\n1,a cat\n2,\n3,a dog\n"))


def test_the_file_must_be_utf_8(write):
    with pytest.raises(ValueError, match="prompts.csv"):
        read_requests(write("prompt\nun café\n".encode("latin-1")))


def test_a_comma_outside_quotes_raises_an_error(write):
    with pytest.raises(ValueError, match="row 2 of .*prompts.csv"):
        read_requests(write("prompt\na dog\na red cat, running on grass\n"))


def test_a_prompt_is_seen_if_a_training_prompt_has_the_same_words():
    prompts = [
        "A red circle  moves up",
        "a red circle moves up ",
        "a red circle moves up.",
        "a red circle",
    ]
    training = [Request("a red circle\nmoves up"), Request("a blue circle moves up")]
    assert are_seen(prompts, training) == [True, True, False, False]


def test_a_row_may_have_a_seed_which_is_part_of_the_identity(write):
    requests = read_requests(write("prompt,seed\na cat,7\na dog,\na cow,-1\n"))
    assert [request.seed for request in requests] == [7, None, -1]
    assert [request.seed_or(3) for request in requests] == [7, 3, -1]
    without = [Request(request.prompt) for request in requests]
    assert hash_requests(requests) != hash_requests(without)
    assert (
        hash_requests(without[1:2])
        == hash_requests(requests[1:2])
        == "61b9235fe870ead82e3dfc15b8b16276"
    )


def test_a_seed_must_be_an_integer(write):
    with pytest.raises(ValueError, match="seed .* row 2 of .*prompts.csv"):
        read_requests(write("prompt,seed\na cat,7\na dog,7.5\n"))


# --- reference images --------------------------------------------------------------------------


def test_a_row_may_name_an_image_beside_the_file(write, tmp_path):
    (tmp_path / "cat.png").write_bytes(b"")
    first, second = read_requests(write("prompt,ref_image_path\na cat jumps,cat.png\na dog,\n"))
    assert first == Request("a cat jumps", str(tmp_path / "cat.png"))
    assert second == Request("a dog")


def test_a_row_may_name_a_last_frame_beside_the_first(write, tmp_path):
    for name in ("one.png", "two.png"):
        (tmp_path / name).write_bytes(name.encode())
    one, two = (str(tmp_path / name) for name in ("one.png", "two.png"))
    text = (
        "prompt,ref_last_image_path,ref_image_path\na cat jumps,two.png,one.png\na dog,,one.png\n"
    )
    both, first = read_requests(write(text))
    assert (both.image, both.last_image, both.images) == (one, two, (one, two))
    assert (first.image, first.last_image, first.images) == (one, None, (one,))
    hashes = [both, first, replace(both, image=two, last_image=one), replace(both, last_image=one)]
    assert len({hash_requests([request]) for request in hashes}) == 4
    (tmp_path / "copy").mkdir()
    write_requests(tmp_path / "copy" / "prompts.csv", [both, first])
    assert read_requests(tmp_path / "copy" / "prompts.csv") == [both, first]


@pytest.mark.parametrize(
    "text, message",
    [
        ("prompt,ref_last_image_path\na cat,{}\n", "needs ref_image_path.*row 1 of"),
        (
            "prompt,ref_image_path,ref_last_image_path\na cat,{},dog.png\n",
            "ref_last_image_path.*dog",
        ),
        ("prompt,ref_image_path,last_frame\na cat,{},{}\n", "`last_frame`.*`ref_last_image_path`"),
        ("prompt,image,ref_last_image_path\na cat,{},{}\n", "`image`.*`ref_image_path`"),
    ],
)
def test_a_last_frame_needs_a_first_one_and_its_own_column(write, tmp_path, text, message):
    (tmp_path / "cat.png").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        read_requests(write(text.format("cat.png", "cat.png")))


def test_a_missing_image_is_named(write):
    with pytest.raises(ValueError, match="dog.png.* row 2 of .*prompts.csv"):
        read_requests(write("prompt,ref_image_path\na cat,\na dog,dog.png\n"))


# --- order -------------------------------------------------------------------------------------


def walk(order: PromptOrder, num_iterations: int) -> list[int]:
    return [
        index for iteration in range(1, num_iterations + 1) for index in order.indices(iteration)
    ]


@pytest.mark.parametrize("num_prompts, prompts_per_iteration", [(10, 4), (3, 7)])
def test_each_epoch_visits_every_prompt_once(num_prompts, prompts_per_iteration):
    visited = walk(PromptOrder(num_prompts, prompts_per_iteration, seed=0), 3 * num_prompts)
    assert len(visited) == 3 * num_prompts * prompts_per_iteration
    for start in range(0, 3 * num_prompts, num_prompts):
        assert sorted(visited[start : start + num_prompts]) == list(range(num_prompts))


def test_the_order_is_that_of_earlier_versions():
    """A resumed run continues with the same prompts."""
    orders = [
        PromptOrder(num_prompts, count, seed).indices(iteration)
        for num_prompts in (1, 2, 5, 64, 1000)
        for count in (1, 3, 16, 70)
        for seed in (0, 1, -5, 2**40)
        for iteration in (1, 2, 3, 50)
    ]
    assert PromptOrder(7, 5, seed=3).indices(2) == [2, 0, 0, 5, 4]
    assert PromptOrder(3, 8, seed=0).indices(2) == [2, 0, 1, 2, 0, 2, 1, 1]
    assert (
        hashlib.blake2b(json.dumps(orders).encode(), digest_size=8).hexdigest()
        == "ebcdd902173cd42e"
    )


def test_the_order_does_not_depend_on_prompts_per_iteration():
    assert walk(PromptOrder(10, 2, seed=0), 12) == walk(PromptOrder(10, 6, seed=0), 4)


def test_the_hash_of_requests_depends_on_each_part_alone_and_not_on_file_names(tmp_path):
    for name, content in (("one", b"1"), ("two", b"2"), ("copy", b"1")):
        (tmp_path / name).write_bytes(content)
    one, two, copy = (str(tmp_path / name) for name in ("one", "two", "copy"))
    first = Request("a", one)
    variants = [[first], [Request("b", one)], [Request("a", two)], [Request("a")], [first, first]]
    variants += [[Request("a", one, seed=0)], [Request("a", one, seed=1)]]
    variants += [[first, Request("b")], [Request("b"), first]]  # the order
    assert len({hash_requests(requests) for requests in variants}) == len(variants)
    assert hash_requests([first]) == hash_requests([Request("a", copy)])


def test_the_questions_of_a_prompt_are_part_of_its_identity():
    assert hash_requests([Request("a", checks='["b?"]')]) != hash_requests([Request("a")])
