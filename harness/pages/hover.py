"""What a point says of itself on hover; it takes one row of a ranked table of markup and returns a few lines of HTML."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from harness.analysis.labels import mode
from harness.analysis.point_row import BASE
from harness.analysis.points import Row
from harness.pages.glossary import judged
from harness.pages.markup import markup
from harness.pages.table import problems
from harness.pages.units import difference, iec, interval_text, score_text, share_text, small
from harness.types import BYTE_KINDS

_WRAP = 92


def hover(row: Row) -> str:
    """Name, score, difference, bytes with their parts, budget, status and the full configuration of one point."""
    lines = [f"<b>{row['label']}</b>  ·  {mode(row)}", _score(row), *_difference(row), *_bytes(row)]
    lines += [*_fidelity(row), _budget(row), _status(row)]
    config = "  ".join(f"{key}={value}" for key, value in flat(json.loads(row["stack_config"])))
    lines += [f"<i>{markup(line)}</i>" for line in textwrap.wrap(config, _WRAP)]
    return "<br>".join(lines)


def is_stream(row: Row) -> bool:
    """Whether the point read a stream: its bytes are then time means, and all else is as held at the end."""
    return math.isfinite(row["chunk"])


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of a nested configuration; classes by their last name, empty parts left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value).rsplit(".", 1)[-1] if key == "_target_" else str(value)


def _score(row: Row) -> str:
    text = f"{row['metric']} <b>{score_text(row['score'])}</b> {interval_text(row['score_lo'], row['score_hi'])}"
    return f"{text}  ·  n {row['n']}"


def _difference(row: Row) -> list[str]:
    if row["stack"] == BASE:
        return []
    if not math.isfinite(row["diff_to_full"]):
        return [f"vs full: none, {row['diff_reason']}"]
    found = difference(row)
    unit = (" nats a token" if is_stream(row) else f" in log {row['metric']}") if found.in_nats else ""
    text = f"vs full {found.text}{unit} paired"
    test = f"  ·  McNemar p {row['mcnemar_p']:.2g}" if math.isfinite(row["mcnemar_p"]) else ""
    least = row.get("detectable", math.nan)
    seen = f"  ·  could see {small(least)}{' nats' if found.in_nats else ''}" if math.isfinite(least) else ""
    return [f"{text}{test}{_holm(row)}  ·  {judged(row)}{seen}"]


def _holm(row: Row) -> str:
    adjusted = row.get("holm_p", math.nan)
    return f"  ·  among all points p {adjusted:.2g} (Holm)" if math.isfinite(adjusted) else ""


def _bytes(row: Row) -> list[str]:
    total = f"KV <b>{iec(row['bytes_context'])}</b>  ·  {share_text(row['ratio'])} of full ({iec(row['bytes_full'])})"
    parts = " + ".join(f"{kind} {iec(row[f'allocated_{kind}'])}" for kind in BYTE_KINDS if row[f"allocated_{kind}"] > 0)
    over = "  <b>(above the full cache)</b>" if row["peak_exceeds_full"] else ""
    peak = f"highest peak {iec(row['bytes_peak'])}  ·  in prefill {iec(row['bytes_peak_prefill'])}{over}"
    stream = is_stream(row)
    mean, then, end = ("time mean ", ", at the end", "stream") if stream else ("", "", "answer")
    return [
        f"{mean}{total}  ·  {row['storage']}",
        f"allocated{then}: {parts or '–'}  ·  logical {iec(row['bytes_logical'])}",
        f"end of {end} {iec(row['bytes_final'])}  ·  {peak}",
    ]


def _fidelity(row: Row) -> list[str]:
    named = [
        ("KL to full", small(row["kl_to_full"])),
        ("top-1 agreement", share_text(row["top1_agreement"])),
        ("attention error", small(row["attention_error"])),
        ("answers changed", share_text(row["answer_flips"])),
        ("nats a byte", score_text(row["nll_per_byte"])),
    ]
    known = [f"{name} {text}" for name, text in named if text != "–"]
    return ["  ·  ".join(known)] if known else []


def _budget(row: Row) -> str:
    value = "" if math.isnan(row["budget_value"]) else f" {row['budget_value']:g}"
    named: str = f"{row['budget_unit']}{value}" if pd.notna(row["budget_unit"]) else f"{value or 'none'}".strip()
    kept = f"kept {row['tokens_kept']:.0f} of {row['tokens_seen']:.0f} tokens" if row["n"] else "kept –"
    bits = f"  ·  {row['effective_bits']:.2f} bits a kept value" if math.isfinite(row["effective_bits"]) else ""
    chunk = f" (chunks of {row['chunk']:.0f})" if is_stream(row) else ""
    return f"budget {named}  ·  {kept}{bits}  ·  phase {row['phase']}{chunk}, positions {row['positions']}"


def _status(row: Row) -> str:
    place = "on the frontier" if row["on_frontier"] else "beaten" if pd.isna(row["left_out"]) else ""
    chance = row.get("p_frontier", math.nan)
    place += f" (on it in {share_text(chance)} of resamples)" if place and math.isfinite(chance) else ""
    known = "; ".join(problems(row)) or "all examples ok"
    return "  ·  ".join(filter(None, (f"status: {known}", place)))
