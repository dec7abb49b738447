"""What a command does when the reader of its output has read enough, as in `... | head`."""

from __future__ import annotations

import signal


def end_with_reader() -> None:
    """End silently then, as other commands of a terminal do. For commands that only print: it may end them at any line."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
