"""Names and errors that came from outside, as text that shows itself and does nothing else; the only place that escapes.

HTML and the small HTML that Plotly reads in its texts decode the same few entities, so one form serves both. Tables become
markup once, before a page is made of them: whatever a figure or a table of the page takes from a row is safe as it is.
"""

from __future__ import annotations

import pandas as pd

from harness.files.plain_files import printable

_MARKS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
DATA = ("point", "stack_config")  # JSON, which is read before it is shown


def one_line(text: object) -> str:
    """The text on one line, see `printable`."""
    return printable(str(text))


def markup(text: object) -> str:
    """The text for HTML (inside an element or a quoted attribute) and for Plotly, where `%{` would ask for a value."""
    return one_line(text).translate(_MARKS).replace("%{", "%&#123;")


def as_markup(table: pd.DataFrame) -> pd.DataFrame:
    """The table with every text as markup; columns that hold JSON stay as they are."""
    texts = [name for name, kind in table.dtypes.items() if isinstance(kind, pd.StringDtype) and name not in DATA]
    return table.assign(**{str(name): _column(table[name]) for name in texts})


def _column(column: pd.Series[str]) -> pd.Series[str]:
    known = {text: markup(text) for text in column.dropna().unique()}
    return column.map(known).astype(column.dtype)
