"""Names that would do something if a page or a terminal took them for more than text, and records that carry them everywhere."""

from __future__ import annotations

from typing import Any

from tests.support.record_factory import grid, make, sha

RUNS = "<img src=x onerror=window.PWNED=1>"
STYLED = "<b>bold</b><i>x</i><a href='javascript:window.PWNED=2'>link</a><br>"
CLOSES = "</script><script>window.PWNED=3</script><!--"
QUOTED = "\" onmouseover=window.PWNED=4 x='"
ASKS = "%{x} %{meta[0]} $x^2$ &lt;u&gt; &amp;"
BREAKS = "one\ntwo\r\nthree\u2028four\u2029five\tsix"
STEERS = "\x1b[31m\x00\x07\u202egnp"
RICH = "[/bold] [red]x[/] [link=file:///x]y :warning: \\"
ALL = (RUNS, STYLED, CLOSES, QUOTED, ASKS, BREAKS, STEERS, RICH)


def records(run_id: str, *, seed: int = 0, kind: str = "needle", **more: Any) -> list[dict[str, Any]]:
    """A run with a hostile text in every field of its records that a user, a model or a file can fill in."""
    made = []
    own = {"model": RUNS, "task": kind + CLOSES, "metric": STYLED, "seed": seed, "run_id": run_id + RUNS, "output": CLOSES}
    own |= {"positions": ASKS, "attn": RUNS, "series_path": None, "gold": [STYLED]}
    stacks: list[tuple[str, dict[str, Any], str]] = [("full", {}, "prefill")]
    stacks += [(text, {"keep.budget.value": 0.1 + i / 10}, text) for i, text in enumerate(ALL)]
    stacks += [("words", {"knob" + text: text, "keep.budget.unit": text}, "always") for text in ALL]
    for stack, point, phase in stacks:
        config = {"keep": {"budget": {"unit": STYLED, "value": CLOSES}, QUOTED: ASKS}, "kv_dtype": RUNS}
        for example in grid(lengths=(64, 128), depths=2, repeats=2):
            names = {"example_id": example["example_id"] + RUNS, "group_id": CLOSES + example["group_id"]}
            made.append(
                make(
                    **example | names | own | more,
                    prompt_sha256=sha(example["example_id"], seed),
                    stack=stack,
                    point=point,
                    phase=phase,
                    stack_config=config if stack != "full" else {},
                    kv_bytes_context=30_000 if stack == "full" else 10_000 + len(repr(point)),
                    storage="simulated" if stack == STYLED else "packed",
                )
                | {"layer_budget": f"{RUNS} (asked: {STYLED})"}
            )
        failed = make(**own | more, stack=stack, point=point, phase=phase, stack_config=config, example_id="bad" + stack)
        made.append(failed | {"status": "failed", "score": None, "error": " ".join(ALL)})
    return made
