"""What does each byte of KV cache buy? The Python face of the harness; everything else is reached through the rooms.

    run = harness.evaluate(model="smollm2", stacks=["int8", "snapkv"], task="needle", limit=5)
    run.points, run.records, run.frontier(), run.folder

    lm = harness.load("smollm2")
    cache = lm.cache("a long text", stack="snapkv", keep__budget__value=0.25)
    cache.ask("a question"), cache.bytes, cache.kept_positions

Names are looked up when they are first used, so `import harness` loads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.errors import UserError as UserError
    from harness.loaded import CompressedContext as CompressedContext
    from harness.loaded import LoadedModel as LoadedModel
    from harness.loaded import load as load
    from harness.notebook import Run as Run
    from harness.notebook import evaluate as evaluate
    from harness.stages.budget import Amount as Budget
    from harness.stages.codec.base import Codec as Codec
    from harness.stages.keep import Keep as Keep
    from harness.stages.protocols import LayerView as LayerView
    from harness.stages.protocols import Needs as Needs
    from harness.stages.protocols import Scorer as Scorer
    from harness.stages.stack import Stack as Stack
    from harness.types import Example as Example
    from harness.types import Score as Score
    from harness.types import Task as Task

__all__ = [
    "Budget",
    "Codec",
    "CompressedContext",
    "Example",
    "Keep",
    "LayerView",
    "LoadedModel",
    "Needs",
    "Run",
    "Score",
    "Scorer",
    "Stack",
    "Task",
    "UserError",
    "evaluate",
    "load",
]

_HOMES = {  # module -> what the face takes from it
    "harness.errors": ("UserError",),
    "harness.loaded": ("CompressedContext", "LoadedModel", "load"),
    "harness.notebook": ("Run", "evaluate"),
    "harness.stages.codec.base": ("Codec",),
    "harness.stages.keep": ("Keep",),
    "harness.stages.protocols": ("LayerView", "Needs", "Scorer"),
    "harness.stages.stack": ("Stack",),
    "harness.types": ("Example", "Score", "Task"),
}
_PLACES = {name: (home, name) for home, names in _HOMES.items() for name in names}
_PLACES["Budget"] = ("harness.stages.budget", "Amount")


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    home, there = _PLACES[name]
    globals()[name] = found = getattr(import_module(home), there)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
