"""What a point says of itself: four lines on hover, and all that is known of it for the panel of details.

Both take one row of a ranked table of markup and return lines of HTML.
"""

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
from harness.pages.units import difference, iec, interval_text, score_text, share_text, signed, small
from harness.pages.words.remarks import about_many, peak_text, peaks_at, remarks
from harness.types import BYTE_KINDS

_WRAP = 92


def hover(row: Row) -> str:
    """Name, score, bytes and verdict of one point, a line each."""
    return "<br>".join(_short(row))


def about(row: Row) -> str:
    """What `hover` says, then tests, bytes by part, fidelity, budget, status and the full configuration of one point."""
    lines = [*_short(row), *_tests(row), *_bytes(row), *_fidelity(row), _budget(row), _status(row)]
    config = "  ".join(f"{key}={value}" for key, value in flat(json.loads(row["stack_config"])))
    lines += [f"<i>{markup(line)}</i>" for line in textwrap.wrap(config, _WRAP)]
    return "<br>".join(lines)


def is_stream(row: Row) -> bool:
    """Whether the point read a stream: its bytes are then time means, and all else is as held at the end."""
    return math.isfinite(row["chunk"])


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of a nested configuration, empty parts left out.

    A part is called by its own key and the last name of its class, `keys=IntGroups`; the class of the whole is left out.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif key == "_target_":
            yield from [(prefix[:-1], str(value).rsplit(".", 1)[-1])] if prefix else []
        elif value is not None:
            yield f"{prefix}{key}", str(value)


def _short(row: Row) -> list[str]:
    return [f"<b>{row['label']}</b>  ·  {mode(row)}", _score(row), _size(row), _verdict(row)]


def _score(row: Row) -> str:
    text = f"{row['metric']} <b>{score_text(row['score'])}</b> {interval_text(row['score_lo'], row['score_hi'])}"
    return f"{text}  ·  n {row['n']}"


def _size(row: Row) -> str:
    mean = "time mean KV" if is_stream(row) else "KV"
    text = f"{mean} <b>{iec(row['bytes_context'])}</b>  ·  {share_text(row['ratio'])} of full ({iec(row['bytes_full'])})"
    stored = "  ·  simulated" if row["storage"] == "simulated" else ""
    return "  ·  ".join(filter(None, (f"{text}{stored}", peaks_at([row]))))


def _verdict(row: Row) -> str:
    if row["stack"] == BASE:
        return "the full cache itself"
    if not math.isfinite(row["diff_to_full"]):
        return f"vs full: none, {row['diff_reason']}"
    found = difference(row)
    unit = (" nats a token" if is_stream(row) else f" in log {row['metric']}") if found.in_nats else ""
    return f"vs full {found.text}{unit} paired  ·  {judged(row)}"


def _tests(row: Row) -> list[str]:
    """What else is known of the difference: of a perplexity its own unit, its tests, and what the sample could have shown."""
    if row["stack"] == BASE:
        return []
    in_nats, found = difference(row).in_nats, []
    if in_nats:
        found.append(
            f"vs full {signed(row['diff_to_full'])} {interval_text(row['diff_lo'], row['diff_hi'])} of {row['metric']}"
        )
    known = (
        ("McNemar p", row["mcnemar_p"], ""),
        ("among all points p", row.get("holm_p", math.nan), " (Holm)"),
        ("could prove a loss of", row.get("detectable", math.nan), " nats" if in_nats else ""),
    )
    found += [f"{name} {small(value)}{more}" for name, value, more in known if math.isfinite(value)]
    needed = about_many(row)
    found += [f"open verdict settled by {needed} documents"] if needed else []
    return ["  ·  ".join(found)] if found else []


def _bytes(row: Row) -> list[str]:
    parts = " + ".join(f"{kind} {iec(row[f'allocated_{kind}'])}" for kind in BYTE_KINDS if row[f"allocated_{kind}"] > 0)
    most = row.get("peak_ratio", math.nan)
    share = f"  ({share_text(most)} of the full cache's peak)" if math.isfinite(most) and row["stack"] != BASE else ""
    peak = f"peak while answering {iec(row['bytes_peak'])}  ·  incl. prefill {peak_text(row)}{share}"
    then, end = (", at the end", "stream") if is_stream(row) else ("", "answer")
    return [
        f"allocated{then}: {parts or '–'}  ·  logical {iec(row['bytes_logical'])}  ·  {row['storage']}",
        f"end of {end} {iec(row['bytes_final'])}  ·  {peak}",
    ]


def _fidelity(row: Row) -> list[str]:
    named = [
        ("KL to full", small(row["kl_to_full"])),
        ("top-1 agreement", share_text(row["top1_agreement"])),
        ("attention error", small(row["attention_error"])),
        ("answers in other words", share_text(row["answer_flips"])),
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
    phase = "" if row["stack"] == BASE else f"  ·  phase {row['phase']}"
    return f"budget {named}  ·  {kept}{bits}{phase}{chunk}  ·  positions {row['positions']}"


def _status(row: Row) -> str:
    place = "on the frontier" if row["on_frontier"] else "beaten" if pd.isna(row["left_out"]) else ""
    chance = row.get("p_frontier", math.nan)
    place += f" (on it in {share_text(chance)} of resamples)" if place and math.isfinite(chance) else ""
    known = "; ".join(problems(row)) or "all examples ok"
    return "  ·  ".join(filter(None, (f"status: {known}", place, *remarks(row))))
