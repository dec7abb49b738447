"""What is no Python file and is read at run time travels in a wheel."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_beside_the_code_is_package_data() -> None:
    """The kind: a file that is there in a clone and missing once installed, such as the script of the page."""
    section = (
        (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.setuptools.package-data]\n")[1].split("\n\n")[0]
    )
    named = {package: json.loads(globs) for package, globs in (line.split(" = ") for line in section.splitlines())}
    for package, globs in named.items():
        packed = {path for glob in globs for path in (ROOT / package).glob(glob)}
        there = {path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {path for path in there if path.suffix not in (".py", ".md")} == packed, package
