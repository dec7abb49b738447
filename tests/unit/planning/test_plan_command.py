"""`python -m harness.plan`: what it prints, the page and table it writes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.plan import main


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_a_plan_is_a_table_a_page_and_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    text = said(capsys, "model=llama2_7b", "compress=int8", "seq=4096", "batch=[1,8]", "gpu=[a100_80gb,l4]", f"out={page}")
    assert "2.00 GiB" in text and "524,288" in text  # the full cache of 4,096 tokens, bytes a token
    assert "l4 · " in text and "6,738,415,616 parameters" in text
    sizes = pd.read_csv(tmp_path / "plan.csv")
    assert set(sizes["stack"]) == {"full", "int8"} and set(sizes["batch"]) == {1, 8}
    assert sizes.loc[(sizes["stack"] == "full") & (sizes["batch"] == 8), "kv_bytes"].item() == 8 * 4096 * 524_288
    assert "a100_80gb" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seq=0"], "seq=0 is not possible"),
        (["seq=1,2"], "several values are a list"),
        (["gpu=abacus"], "gpu='abacus' is not possible: known are"),
        (["model=nosuch"], "model=nosuch is not there"),
        (["weights=int3"], "weights='int3' is not possible"),
        (["model=llama2_7b", "model.kv_dtype=fp3"], "model.kv_dtype='fp3' is not possible"),
        (["seq=99999999999999999999999"], "up to 2^30"),  # was a traceback of torch
        (["seq"], "seq is not understood"),  # was a traceback of Hydra
        (["gpu=[[1]]"], "is not possible: known are"),  # a list has no hash
        (["weights=[int8]"], "weights=['int8'] is not possible"),
        (["weights=0"], "weights=0 is not possible"),  # read as none given
        (["out=plan.csv"], ".csv is written beside it"),  # the table took the page's place
        (["out=/dev/null"], "not a device"),  # would have been replaced by a file
        (["task.lengths=[4096]"], "this command reads"),  # dropped without a word, as any other key of a run
        (["limit=3"], "this command reads"),
        (["compress=[int8,int4]"], "several are stacks=[int8,int4]"),  # Hydra merges them, the last one wins
        (["compress.keys.bits=2"], "choose it with compress=NAME"),
    ],
)
def test_what_is_not_possible_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *arguments, code=2)
    assert words in text and len(text.strip().splitlines()) == 1


def test_paths_of_the_home_folder_are_expanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    said(capsys, "model=llama2_7b", "compress=int8", "seq=128", 'out="~/plan.html"')
    assert {path.name for path in tmp_path.iterdir()} == {"plan.html", "plan.csv"}


def test_where_nothing_that_was_asked_for_is_possible_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The kind: a command whose every stack was refused exited with 0."""
    given = ["model=llama2_7b", "seq=128", "compress=gqa_pool"]
    assert "not possible: " in said(capsys, *given, "compress.share.groups=5", code=1)
    said(capsys, *given)


def test_a_list_counts_each_member_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "model=llama2_7b", "compress=int8", "seq=[128,128]", "batch=[1,1]", "gpu=[h200,h200]")
    assert text.count("int8 ") == 2  # in the table of bytes, and in that of the accelerator


def test_it_warns_of_what_bytes_do_not_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "model=llama2_70b", "stacks=[window,fp8_e4m3]", "gpu=a100_80gb", "seq=8192")
    assert "the parameters alone" in text and "do not fit" in text
    assert "do not compute in FP8" in text
    assert "its perplexity collapses past the window" in text
    assert "8192 tokens are more than the 4096 positions" in text


@pytest.mark.parametrize(
    ("stack", "slow"),
    [
        ("nvfp4", {"NVFP4": "a100_80gb, h100_80gb"}),
        ("mxfp8", {"MXFP8": "a100_80gb, h100_80gb"}),
        ("fp8_e4m3", {"FP8": "a100_80gb"}),
        ("int4", {}),
    ],
)
def test_it_warns_of_numbers_that_an_accelerator_does_not_compute_in(
    stack: str, slow: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that has the format is not named."""
    text = said(capsys, "model=llama3_8b", f"stacks=[{stack}]", "gpu=[a100_80gb,h100_80gb,b200]", "seq=1024")
    found = {line.split(" do not compute in ")[1].split(":")[0]: line for line in text.splitlines() if "do not compute" in line}
    assert set(found) == set(slow)
    assert all(f"{names} do not compute" in found[word] and "b200" not in found[word] for word, names in slow.items())
