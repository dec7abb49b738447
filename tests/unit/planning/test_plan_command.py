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
    ],
)
def test_what_is_not_possible_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *arguments, code=2)
    assert words in text and len(text.strip().splitlines()) == 1


def test_it_warns_of_what_bytes_do_not_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "model=llama2_70b", "stacks=[window,fp8_e4m3]", "gpu=a100_80gb", "seq=8192")
    assert "the parameters alone" in text and "do not fit" in text
    assert "do not compute in FP8" in text
    assert "its perplexity collapses past the window" in text
    assert "8192 tokens are more than the 4096 positions" in text
