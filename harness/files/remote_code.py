"""Prevents transformers from running a model's own Python files, even if another library asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from transformers import AutoConfig, AutoTokenizer


@contextmanager
def no_remote_code() -> Iterator[None]:
    """A context in which configs and tokenizers are loaded with trust_remote_code=False, whatever callers pass."""
    with ExitStack() as stack:
        for auto in (AutoConfig, AutoTokenizer):
            stack.enter_context(patch.object(auto, "from_pretrained", _without(auto.from_pretrained)))
        yield


def _without(load: Any) -> Any:
    @wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "trust_remote_code": False})

    return loaded
