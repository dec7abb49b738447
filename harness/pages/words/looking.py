"""The box under a page's title: which model, tasks and stacks it is of, what names mean, and what it says nothing about.

All of it comes from the points and the manifests; what these do not know is left out. Beside that stands in italics, and said
to be no more, what conf/ of this version says of stacks and tasks of these names (see `abouts`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import pandas as pd

from harness.analysis.labels import family_of
from harness.analysis.point_row import BASE
from harness.analysis.points import Row, rows_of
from harness.pages.hover import is_stream
from harness.pages.markup import markup
from harness.pages.units import score_text
from harness.pages.words.abouts import about
from harness.pages.words.columns import WORDS

Manifests = Mapping[str, Mapping[str, Any]]

_ITALICS = (
    "In italics: what the configuration of the version that made this page says of a name. Of records of another version, or "
    "of a stack or task of your own that is called the same, it may not be true."
)
_ANY = "the cache as the model makes it: what all others are compared with"


def looking_at(points: pd.DataFrame, cells: pd.DataFrame, manifests: Manifests) -> str:
    """The box as HTML, from ranked points and cells of markup and the manifests by run id."""
    lines = [
        *_models(points, manifests),
        *_tasks(points, cells, manifests),
        *_names(points, manifests),
        *_limits(points),
    ]
    shown = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    stacks = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in _stacks(points))
    more = f"<details><summary>What each stack does</summary><dl>{stacks}</dl></details>"
    note = f'<p class="quiet small">{_ITALICS}</p>'
    return f'<div class="card small" id="looking"><h3>What you are looking at</h3><dl>{shown}</dl>{note}{more}</div>'


def _models(points: pd.DataFrame, manifests: Manifests) -> Iterator[tuple[str, str]]:
    """Of every model: its weights, the types it was computed and stored in, and the machine."""
    for name, own in points.groupby("model", sort=False):
        known = next((manifests[run] for run in own["run_id"].unique() if run in manifests), {})
        said = [_weights(known.get("model")), _machine(known.get("machine"))]
        yield "model", ". ".join([f"<b>{name}</b>{said[0]}", *filter(None, said[1:])])


def _weights(model: object) -> str:
    if not isinstance(model, Mapping):
        return ""
    file = next((str(model[key]) for key in ("member", "repo", "path", "file") if model.get(key)), "")
    named = markup(PurePosixPath(file).name if model.get("repo") is None else file)
    types = f"weights computed in {markup(model.get('dtype'))}, keys and values stored in {markup(model.get('kv_dtype'))}"
    known = "dtype" in model and "kv_dtype" in model
    return "".join([f": {named}" if named else "", f"; {types}" if known else ""])


def _machine(machine: object) -> str:
    if not isinstance(machine, Mapping):
        return ""
    accelerators = machine.get("accelerators")
    if isinstance(accelerators, list) and accelerators:
        return f"Made on {markup(', '.join(dict.fromkeys(map(str, accelerators))))}"
    return f"Made on a CPU ({markup(machine.get('processor', ''))}, {markup(machine.get('cpus', '?'))} cores)"


def _tasks(points: pd.DataFrame, cells: pd.DataFrame, manifests: Manifests) -> Iterator[tuple[str, str]]:
    """Of every task: what it is, how many examples of what length, and what its score is."""
    for task, own in points.groupby("task", sort=False):
        first = own.iloc[0]
        better = "higher" if first["higher_is_better"] else "lower"
        sizes = "; ".join(
            dict.fromkeys(_size(panel) for _, panel in own.groupby(["run_id", "model", "query_aware"], sort=False))
        )
        asked = sorted(cells.loc[cells["task"] == task, "length"].dropna().unique().tolist())
        lengths = f" (asked for: {', '.join(f'{length:,.0f}' for length in asked)})" if asked and len(asked) <= 8 else ""
        chance = f", a guess gets {score_text(first['chance'])}" if pd.notna(first["chance"]) else ""
        what = _quoted("task", str(task))
        yield str(task), f"{what} {sizes}{lengths}. Score: {_metric(first)}{better} is better{chance}.".strip()


def _metric(row: Row) -> str:
    """The name of a score, and what it is where the glossary knows it."""
    entry = WORDS.get(str(row["metric"]))
    return f"{row['metric']} ({entry.meaning}), " if entry else f"{row['metric']}, "


def _size(panel: pd.DataFrame) -> str:
    """How many examples of how many tokens of context, as the full cache read them."""
    most = panel.iloc[int(panel["n"].to_numpy().argmax())]
    base = panel[(panel["stack"] == BASE) & (panel["n"] > 0)]
    row = base.iloc[0] if len(base) else most
    stream = is_stream(row)
    counted = f"{row['n']} {'document' if stream else 'prompt'}{'' if row['n'] == 1 else 's'}"
    shared = f" on {row['n_documents']} documents" if not stream and row["n_documents"] < row["n"] else ""
    tokens = f" of about {row['tokens_seen']:,.0f} tokens" if row["n"] else ""
    asked = "" if stream else f" ({'question seen' if row['query_aware'] else 'question unseen'} while compressing)"
    return f"{counted}{shared}{tokens}{asked}"


def _names(points: pd.DataFrame, manifests: Manifests) -> Iterator[tuple[str, str]]:
    """What a fraction in a name is of; nothing where no point has one."""
    shares = points[points["budget_unit"].eq("fraction").fillna(False).astype(bool)]
    if shares.empty:
        return
    value = shares["budget_value"].iloc[0]
    text = f"{value:g} of the context's tokens are kept, mean over layers and KV heads; the rest is evicted."
    if any(map(is_stream, rows_of(shares))):
        first = [context for run in shares["run_id"].unique() if (context := _context(manifests.get(run, {})))]
        tokens = f"its first {first[0]:,} tokens" if first else "what is read before scoring"
        text += f" The context of a stream is {tokens}; later ones stay too or push out others, see the column <i>kept</i>."
    yield f"{value:g} in a name", text


def _context(manifest: Mapping[str, Any]) -> int | None:
    config = manifest.get("config")
    task = config.get("task") if isinstance(config, Mapping) else None
    context = task.get("context") if isinstance(task, Mapping) else None
    return context if isinstance(context, int) and context > 0 else None


def _limits(points: pd.DataFrame) -> Iterator[tuple[str, str]]:
    longest = points["tokens_seen"].max()
    beyond = f"contexts beyond {longest:,.0f} tokens, " if pd.notna(longest) else ""
    yield (
        "not said",
        f"Nothing about {beyond}other models or tasks, or speed (<code>python -m harness.speed</code>). Bytes are those of the "
        "KV cache alone: no weights, no activations.",
    )


def _stacks(points: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Of every stack what kinds of parts its records name, then what is said of its name."""
    for row in rows_of(points.drop_duplicates("stack")):
        yield str(row["stack"]), _ANY if row["stack"] == BASE else _about(row)


def _about(row: Row) -> str:
    changed = ", " in str(row["stack"])
    said = _quoted("compress", str(row["stack"]))
    more = " Changed as its name says." if said and changed else ""
    return ": ".join(filter(None, (family_of(json.loads(row["stack_config"])), said))) + more


def _quoted(kind: str, name: str) -> str:
    found = about(kind, name)
    return f"<i>{markup(found)}</i>" if found else ""
