"""A list of (layer, KV head) pairs, from a configuration or a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from harness.errors import UserError, require
from harness.files.paths import user_path
from harness.files.plain_files import read_plain

PAIRS = "a list of [layer, KV head] pairs of whole numbers, 0 or more"


def head_list(key: str, heads: Sequence[Sequence[int]] | None, file: str | None) -> frozenset[tuple[int, int]] | None:
    """The pairs of `heads`, or of the key "heads" in a JSON file; None when neither is given.

    Raises:
        UserError: both are given, the file cannot be read, or it holds no such list.
    """
    require(heads is None or file is None, f"{key}.file", file, f"{key}.heads is set as well: give one of the two")
    found: Any = heads
    if file is not None:
        key = f"{key}.file={file}"
        try:
            found = _read(file)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{key} is not possible: it must be JSON with a key 'heads' ({type(error).__name__})") from None
    if found is None:
        return None
    pairs = isinstance(found, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(x) is int and x >= 0 for x in pair) for pair in found
    )
    require(pairs, key if file else f"{key}.heads", found, PAIRS)
    return frozenset((layer, head) for layer, head in found)


@lru_cache
def _read(file: str) -> Any:
    """Cached: every example of a run sees the same list, even if the file changes."""
    return json.loads(read_plain(user_path(file), follow=True))["heads"]
