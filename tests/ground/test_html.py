"""A table for notebooks, safe whatever the values hold."""

from __future__ import annotations

from typing import Any

import pytest

from prized_gym.html import table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.123"),
        (1234567.0, "1.23e+06"),
        (float("nan"), "nan"),
        (3, "3"),
        ("", ""),
        ("<script>", "&lt;script&gt;"),
        ("\"'&", "&quot;&#x27;&amp;"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "…"),
        # Cut before it is escaped, so that no entity is cut in two.
        ("<" * 201, "&lt;" * 200 + "…"),
    ],
)
def test_a_value_is_shortened_and_escaped(value: Any, shown: str) -> None:
    assert f'<td style="text-align:left">{shown}</td>' in table("title", {"name": value})


def test_titles_and_names_are_escaped_and_what_is_none_is_left_out() -> None:
    assert table("<b>", {"a&b": 1, "none": None}) == (
        '<div><b>&lt;b&gt;</b><table><tr><th style="text-align:left">a&amp;b</th>'
        '<td style="text-align:left">1</td></tr></table></div>'
    )
    assert table("t", {}) == "<div><b>t</b><table></table></div>"
