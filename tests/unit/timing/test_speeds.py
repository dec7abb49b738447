"""Speeds as a table: medians, spreads, ratios within a repeat; and how transient bytes are counted."""

from __future__ import annotations

import math

import pytest
import torch

from harness.configure.arms import Arm
from harness.errors import UserError
from harness.speed import Asked, divided
from harness.stages.stack import Stack
from harness.timing.measured import Once, Timed
from harness.timing.speeds import speeds
from harness.timing.transients import peak_above_end, transient_bytes


def arm(label: str, **point: object) -> Arm:
    return Arm(label, dict(point), {"keep": {"budget": {"unit": "fraction", "value": 0.5}}}, Stack())


def once(first: float, decode: float, tokens: int = 4) -> Once:
    return Once(prefill=first - 2, compress=1.5, first=0.5, decode=decode, tokens=tokens)


def test_medians_spread_and_ratios_of_the_same_repeat() -> None:
    """The machine was twice as slow in the last repeat: that moves both arms, and no ratio."""
    full = Timed([once(4, 1), once(4, 1), once(8, 2)], held=100, transient_read=7, transient_decode=3)
    other = Timed([once(6, 2), once(6, 2), once(12, 4)], held=50, transient_read=9, transient_decode=None)
    table = speeds(
        [arm("full"), arm("h2o", **{"keep.budget.value": 0.25})], {"full": full, "h2o keep.budget.value=0.25": other}
    )
    base, row = table.to_dict("records")
    assert (base["to_first"], base["to_first_lo"], base["to_first_hi"], base["rate"]) == (4, 4, 8, 4)
    assert (base["to_first_ratio"], base["rate_ratio"]) == (1, 1)
    assert (row["arm"], row["to_first"], row["to_first_ratio"], row["rate_ratio"]) == ("h2o 0.25", 6, 1.5, 0.5)
    assert (row["kv_bytes"], row["transient_read"]) == (50, 9) and math.isnan(row["transient_decode"])


def test_an_arm_that_was_refused_says_why_and_ends_no_other() -> None:
    found = {"full": Timed([once(4, 1)], held=1), "tova": Timed(error="too small")}
    full, refused = speeds([arm("full"), arm("tova")], found).to_dict("records")
    assert (full["error"], full["rate"]) == ("", 4)
    assert refused["error"] == "too small" and math.isnan(refused["rate"])


@pytest.mark.parametrize(
    ("changes", "found"),
    [([], 0), ([10, -10], 10), ([10, 5, -5], 5), ([10, -10, 4], 6), ([-8, 3], 0), ([-8, 12, -12], 4)],
)
def test_the_peak_is_above_what_stays(changes: list[int], found: int) -> None:
    """What was freed of what was there before makes no room: the start is the floor."""
    assert peak_above_end(changes) == found


def test_transient_bytes_of_a_cpu_are_those_of_its_allocations() -> None:
    def work() -> torch.Tensor:
        gone, kept = torch.zeros(1000), torch.zeros(500)  # 4,000 and 2,000 bytes
        kept + gone[:500]  # 2,000 more at once
        return kept

    assert transient_bytes(work, torch.device("cpu")) == 6000


def test_keys_of_the_command() -> None:
    asked, rest = divided(["seq=64", "compress=int8", "new=4", "warm_up=0"])
    assert (asked, rest) == (Asked(seq=64, new=4, warm_up=0), ["compress=int8"])
    for wrong in ("seq=1", "new=1", "repeats=0", "repeats=2.5", "warm_up=-1", "out=/nowhere/at/all/page.html"):
        with pytest.raises(UserError, match=wrong.split("=")[0]):
            divided([wrong])
    with pytest.raises(UserError, match="given twice"):
        divided(["seq=4", "seq=8"])
