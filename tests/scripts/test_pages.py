"""The parts of pages that `scripts.pages` writes."""

import pytest

from scripts.pages.__main__ import main, with_part


def test_the_pages_are_up_to_date(capsys):
    main(["--check"])
    assert capsys.readouterr().out == ""


def test_a_part_is_replaced_between_its_comments():
    page = "a\n<!-- begin x -->\n\nold\n\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    made = with_part(page, "x", "new \\1\n")
    assert made.startswith("a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n")
    assert with_part(made, "x", "new \\1\n") == made
    for damaged in (page.replace("<!-- end x -->", ""), page + page):
        with pytest.raises(ValueError, match="begin x"):
            with_part(damaged, "x", "new")
