"""Tests of rendered templates."""

import pytest
from jinja2 import UndefinedError

from hyvideo.data.templates import fill


def test_statements_leave_no_lines_and_numbers_have_three_digits(tmp_path):
    template = tmp_path / "text.txt.jinja"
    template.write_text(
        "{% for value in values %}\n{{ value | number }} GiB < all\n{% endfor %}\n{% if 0 %}\nno\n"
        "{% endif %}\n"
    )
    assert (
        fill(template, values=[0.012345, 99.94, 12345.6])
        == "0.0123 GiB < all\n99.9 GiB < all\n12,346 GiB < all"
    )


def test_an_undefined_value_raises_an_error(tmp_path):
    template = tmp_path / "text.txt.jinja"
    template.write_text("{{ absent }}")
    with pytest.raises(UndefinedError, match="absent"):
        fill(template)
