"""A written page in a headless Chromium, or as the data it holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=30000"),
)


def ask(page: Path, expression: str, scratch: Path) -> Any:
    """The value of a script expression (it may await) in a copy of the page opened from disk, after it has drawn."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is needed under CI: make ci-deps")
        pytest.skip("chromium is not installed: make ci-deps")
    early = "<script>window.faults=[];addEventListener('error',e=>faults.push(e.message));"
    early += "addEventListener('securitypolicyviolation',e=>faults.push(e.blockedURI))</script>"
    late = f"""<script>window.ready.then(async () => {expression}).catch(e => 'fault: ' + e).then(value => {{
      const out = document.createElement('pre'); out.id = 'result';
      out.textContent = JSON.stringify({{value, faults}}); document.body.append(out); }});</script>"""
    copy = scratch / "asked.html"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("<style>", early + "<style>", 1).replace("</body>", late + "</body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    answer = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert answer["faults"] == []
    return answer["value"]


def content(page: Path) -> dict[str, Any]:
    """The data of a page, with what it holds once put back where it belongs, as the page's script does it."""
    text = page.read_text(encoding="utf-8")
    found = json.loads(re.search(r'<script id="content" type="application/json">(.*?)</script>', text, re.DOTALL)[1])

    def hover(number: int) -> str:
        lines = (found["lines"][line] for line in found["texts"][number])
        return "<br>".join("".join(found["parts"][part] for part in line) for line in lines)

    def whole(value: Any) -> Any:
        if isinstance(value, dict) and "@" in value:
            return [value["@"]] * value["n"] if "n" in value else found["lists"][value["@"]]
        if isinstance(value, dict):
            return {key: whole(one) for key, one in value.items()}
        return [whole(one) for one in value] if isinstance(value, list) else value

    found |= {name: whole(found[name]) for name in ("figures", "points", "facets", "rows")}
    for trace in (trace for figure in found["figures"].values() for trace in figure["data"]):
        if trace["type"] != "heatmap" and "customdata" in trace:
            trace["customdata"] = [hover(number) for number in trace["customdata"]]
    found["points"]["about"] = list(map(hover, found["points"]["about"]))
    return found
