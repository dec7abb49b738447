"""What the READMEs show is there: commands compose, links lead somewhere, the front page stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.configure.arguments import check_arguments, is_sweep
from harness.configure.arms import arms_of
from harness.configure.from_python import composed

ROOT = Path(__file__).parents[3]
READMES = [
    p
    for p in (
        ROOT / name
        for name in ("README.md", *(f"{d}/README.md" for d in ("harness", "harness/stages", "tasks", "conf", "results")))
    )
    if p.is_file()
]
MODULES = {"report", "recommend", "plan", "speed", "status", "verify", "families", "lm_eval", "calibrate.retrieval_heads"}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(module, arguments) of every command line in the READMEs."""
    for path in READMES:
        text = re.sub(r" \\\n\s*", " ", path.read_text(encoding="utf-8"))
        for line in text.splitlines():
            found = re.match(r"(?:PYTHONPATH=\S+ )?python -m (harness\S*) (.*)", line.strip())
            if found:
                yield found[1], shlex.split(found[2], comments=True)


def of(module: str) -> list[list[str]]:
    return [arguments for name, arguments in commands() if name == module]


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize("arguments", [a for a in of("harness") if "--config-dir" not in a and not is_sweep(a)], ids=" ".join)
def test_every_command_composes(arguments: list[str]) -> None:
    assert arms_of(composed(arguments), arguments)


@pytest.mark.usefixtures("composed_once")
@pytest.mark.parametrize("arguments", [a for a in of("harness") if is_sweep(a)], ids=" ".join)
def test_every_sweep_composes_at_its_first_values(arguments: list[str]) -> None:
    check_arguments(arguments)
    given = [re.sub(r"=(\[[^\]]*\]|[^,]*),.*", r"=\1", a) for a in arguments if not a.startswith(("-", "hydra"))]
    assert arms_of(composed(given), given)


def test_every_other_command_is_there() -> None:
    named = {name.removeprefix("harness.") for name, _ in commands()} - {"harness"}
    assert named <= MODULES
    homes = [ROOT / "harness" / name.replace(".", "/") for name in named]
    assert all(home.with_suffix(".py").is_file() or (home / "__main__.py").is_file() for home in homes)


@pytest.mark.parametrize("path", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_named_files_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = {one for one in re.findall(r"\]\(([^)#]+)\)", text) if not one.startswith("http")}
    # Written beside these pages; each is checked as soon as it is there.
    pending = {ROOT / "conf/README.md", ROOT / "results/README.md"}
    assert [
        one for one in links if not (path.parent / one).resolve().exists() and (path.parent / one).resolve() not in pending
    ] == []
    files = set(re.findall(r"`((?:harness|tasks|conf|tests)/[\w/.]+\.(?:py|yaml|md))`", text))
    assert [one for one in files if "NAME" not in one and not (ROOT / one).exists()] == []


def test_the_front_page_is_short_and_names_every_stack_that_drops_tokens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    keeps = {p.stem for p in (ROOT / "conf/keep").glob("*.yaml")}
    assert [name for name in sorted(keeps) if f"`{name}`" not in text] == []


def test_the_python_example_is_short() -> None:
    assert len(python_example().splitlines()) <= 15


def python_example() -> str:
    """The last Python block of the front page: the one that uses the Python face."""
    return (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[-1].split("```", 1)[0]


@pytest.mark.slow
def test_the_python_example_runs_as_it_stands(tmp_path: Path) -> None:
    text = python_example()
    assert text.count("limit=5") == 1
    short = text.replace("limit=5", "limit=1, **{'task.lengths': [320]}")  # all but how many documents, and how long
    (tmp_path / "example.py").write_text(short, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout and "valuenorm" in done.stdout
    assert (tmp_path / "frontier.html").stat().st_size > 10_000
    (folder,) = (tmp_path / "results").iterdir()
    assert (folder / "dashboard.html").is_file()
