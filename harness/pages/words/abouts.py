"""What conf/ of this version says of a stack or a task of a name.

By name alone: a record may be of another version, or of a stack of its user's own that is called the same.
"""

from __future__ import annotations

import re
from functools import cache

from harness.analysis.labels import BETWEEN
from harness.files.paths import CONF

_NAME = re.compile(r"[\w-]+")
_SENTENCE = re.compile(r"(?<=[^.][.:]) ")


@cache
def about(kind: str, name: str) -> str:
    """What stands as a comment at the top of conf/<kind>/<name>.yaml, on one line, of a task its first sentence; else empty.

    kind: `compress` or `task`. A stack that was changed is known by what it was before.
    """
    plain = name.split(BETWEEN)[0]
    path = CONF / kind / f"{plain}.yaml"
    if not _NAME.fullmatch(plain) or not path.is_file():
        return ""
    said = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        said.append(line.lstrip("# ").strip())
    text = " ".join(said)
    return text if kind == "compress" else _SENTENCE.split(text)[0]
