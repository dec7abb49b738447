"""Perplexity by position: buckets against sums by hand, files that are missing or not ours, what stands in curves.csv."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.analysis.curves import COLUMNS, Curves, bucket_width, curves
from harness.analysis.frontier import frontier, rank
from harness.analysis.points import points
from harness.pages.outputs import write_all
from harness.pages.place_figures import ALL, budgets, of_panel
from tests.support.record_factory import sweep, write_shard
from tests.support.stream_factory import document, stream

STACKS = ("full", "int8", "h2o", "window")


def read(folder: Path, records) -> Curves:
    return curves(folder, records, points(records))


def of(found: Curves, label: str) -> pd.DataFrame:
    return found.frame[found.frame["label"] == label]


def test_a_bucket_is_the_exponential_of_the_mean_over_documents_and_tokens(tmp_path: Path) -> None:
    records = stream(tmp_path, STACKS, (0.25, 0.5), documents=3, tokens=200)
    part = of(read(tmp_path, records), "h2o 0.25")
    whole = np.stack([document("h2o", 0.25, i, 200)[0] for i in range(3)]).astype(float)  # column j is position j + 1
    by_hand = [whole[:, 0:63], whole[:, 63:127], whole[:, 127:199]]  # 192..199 is less than half a bucket
    assert part[["start", "stop"]].to_numpy().tolist() == [[0, 64], [64, 128], [128, 200]]
    assert part["tokens"].tolist() == [3 * 63, 3 * 64, 3 * 72]
    assert part["position"].tolist() == [32, 95.5, 163.5]
    assert part["nll"].tolist() == pytest.approx([b.mean() for b in by_hand])
    assert part["perplexity"].tolist() == pytest.approx([math.exp(b.mean()) for b in by_hand])
    assert part["kl"].tolist() == pytest.approx([0.095] * 3)
    assert set(part["documents"]) == {3}


def test_all_buckets_together_give_the_score_of_the_point(tmp_path: Path) -> None:
    records = stream(tmp_path, STACKS, (0.25, 0.5), tokens=300)
    table, found = points(records), read(tmp_path, records)
    assert set(found.frame["label"]) == set(table["label"])
    for _, row in table.iterrows():
        part = of(found, row["label"])
        total = math.exp((part["nll"] * part["tokens"]).sum() / part["tokens"].sum())
        assert total == pytest.approx(row["score"], rel=1e-5)
        assert part["tokens"].sum() == 3 * 299


@pytest.mark.parametrize(("tokens", "width"), [(2, 64), (512, 64), (4096, 64), (4097, 128), (100_000, 2048)])
def test_longer_streams_get_wider_buckets(tokens: int, width: int) -> None:
    assert bucket_width(tokens) == width


def test_a_document_shorter_than_a_bucket_is_one_bucket(tmp_path: Path) -> None:
    part = read(tmp_path, stream(tmp_path, ["full"], [], tokens=20)).frame
    assert part[["start", "stop", "tokens"]].to_numpy().tolist() == [[0, 20, 57]]


def test_the_table_has_its_types_also_when_it_is_empty(tmp_path: Path) -> None:
    full, none = read(tmp_path, stream(tmp_path, STACKS, [0.5])).frame, read(tmp_path, sweep(stacks=["full"], repeats=1)).frame
    assert none.empty
    assert full.dtypes.equals(none.dtypes)
    assert list(full.columns) == list(COLUMNS)


def test_missing_files_are_one_line_and_the_other_documents_stay(tmp_path: Path) -> None:
    records = stream(tmp_path, STACKS, (0.25, 0.5))
    for record in records[:2]:
        (tmp_path / record["series_path"]).unlink()
    found = read(tmp_path, records)
    (line,) = found.problems
    assert line.startswith("2 series files are missing") and records[0]["series_path"] in line
    assert set(of(found, "full")["documents"]) == {1}
    assert set(of(found, "int8")["documents"]) == {3}


@pytest.mark.parametrize("kind", ["text", "columns", "words", "longer", "other document", "folder", "empty"])
def test_foreign_files_are_one_line(tmp_path: Path, kind: str) -> None:
    records = stream(tmp_path, ["full", "int8"], [])
    path = tmp_path / records[0]["series_path"]
    frame = pd.read_parquet(path)
    path.unlink()
    if kind == "text":
        path.write_text("position,nll,kl\n1,2,3\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        changed = {
            "columns": frame.rename(columns={"nll": "loss"}),
            "words": frame.assign(nll="many"),
            "longer": frame.assign(position=frame["position"] + 1000),
            "other document": frame.assign(nll=frame["nll"] * 2),
        }
        changed[kind].to_parquet(path)
    found = read(tmp_path, records)
    (line,) = found.problems
    assert line.startswith("1 series file is ") and str(path) in line and "\n" not in line
    assert set(of(found, "full")["documents"]) == {2}


def test_a_rerun_replaces_the_old_curve_and_unscored_records_have_none(tmp_path: Path) -> None:
    old = stream(tmp_path, ["full"], [], documents=2)
    new = stream(tmp_path, ["full"], [], documents=1, key="new")
    failed = old[1] | {"status": "failed", "score": None}
    assert set(read(tmp_path, [*old, *new]).frame["documents"]) == {2}
    assert set(read(tmp_path, [old[0], failed]).frame["documents"]) == {1}


def test_an_infinite_loss_is_an_infinite_perplexity(tmp_path: Path) -> None:
    records = stream(tmp_path, ["full"], [], documents=1)
    path = tmp_path / records[0]["series_path"]
    pd.read_parquet(path).assign(nll=np.float32(2000)).to_parquet(path)
    found = read(tmp_path, [records[0] | {"score": 2000.0}])
    assert found.problems == []
    assert np.isinf(found.frame["perplexity"]).all()


def test_curves_csv_is_written_for_streams_and_for_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = stream(tmp_path / "s", STACKS, (0.25, 0.5))
    write_shard(tmp_path / "s", records)
    write_shard(tmp_path / "n", sweep(stacks=["full"], repeats=1))
    write_all(tmp_path / "s")
    write_all(tmp_path / "n")
    csv = pd.read_csv(tmp_path / "s" / "curves.csv")
    assert csv["perplexity"].tolist() == pytest.approx(read(tmp_path / "s", records).frame["perplexity"].tolist())
    assert not (tmp_path / "n" / "curves.csv").exists()
    assert caplog.messages == []
    for path in (tmp_path / "s" / "series").iterdir():
        path.unlink()
    write_all(tmp_path / "s")
    assert len(caplog.messages) == 1
    assert pd.read_csv(tmp_path / "s" / "curves.csv").empty
    assert "18 series files are missing" in (tmp_path / "s" / "dashboard.html").read_text(encoding="utf-8")


def test_a_page_opens_near_a_quarter_and_every_stack_has_a_line_at_every_choice(tmp_path: Path) -> None:
    records = stream(tmp_path, STACKS, (0.1, 0.3, 0.8)) + stream(tmp_path, ["tova"], (0.2, 0.5))
    lines = of_panel(read(tmp_path, records).frame, rank(points(records)))
    choices, first = budgets(lines)

    def names(choice: str) -> list[str]:
        return [row["label"] for (row, _), on in zip(lines, choices[choice], strict=True) if on]

    assert list(choices) == [f"fraction {b}" for b in (0.1, 0.2, 0.3, 0.5, 0.8)] + [ALL]
    assert first in ("fraction 0.2", "fraction 0.3")
    assert names("fraction 0.8") == ["h2o 0.8", "int8", "tova 0.5", "window 0.8", "full"]
    assert names("fraction 0.1") == ["h2o 0.1", "int8", "tova 0.2", "window 0.1", "full"]
    assert len(names(ALL)) == len(lines) == 10


def test_fidelity_is_a_mean_over_tokens_and_moments_are_not_mixed(tmp_path: Path) -> None:
    records = stream(tmp_path, ["full", "h2o"], [0.25], documents=2)
    for record, weight, kl in zip([r for r in records if r["stack"] == "h2o"], (100.0, 300.0), (0.1, 0.5), strict=True):
        record |= {"weight": weight, "metrics": record["metrics"] | {"kl_to_full": kl}}
    table = points(records).set_index("label")
    assert table.loc["h2o 0.25", "kl_to_full"] == pytest.approx(0.4)
    assert table.loc["h2o 0.25", "top1_agreement"] == pytest.approx(0.905)
    assert table.loc["h2o 0.25", "effective_bits"] == pytest.approx(16.0)  # exact rows, however long the mean was
    assert not table["peak_exceeds_full"].any()
    assert points(sweep(stacks=["full"], repeats=1))["kl_to_full"].isna().all()


def test_the_joint_note_is_false_where_one_group_is_at_chance(tmp_path: Path) -> None:
    told = stream(tmp_path, ["full", "h2o"], [0.5])
    floor, unknown = (stream(tmp_path, ["full", "h2o"], [0.5], task=f"t{c}", chance=c) for c in (2.0, 0.0))
    joint = [frontier(rank(points(records)))["discriminative"] for records in (told, told + unknown, told + unknown + floor)]
    assert joint == [True, None, False]
