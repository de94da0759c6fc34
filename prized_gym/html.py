"""HTML for notebooks: a title over a small table, safe whatever the values hold."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_LONGEST = 200


def table(title: str, rows: Mapping[str, Any]) -> str:
    """Build a title over a table of names and values.

    Args:
        title: as text, which is escaped.
        rows: values by name; those that are None are left out, long ones shortened.
    """
    body = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{_cell(value)}</td></tr>'
        for name, value in rows.items()
        if value is not None
    )
    return f"<div><b>{escape(title)}</b><table>{body}</table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.3g}"
    text = str(value)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
