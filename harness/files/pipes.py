"""What a command does when the reader of its output has read enough, as in `... | head`."""

from __future__ import annotations

import signal


def end_with_reader() -> None:
    """End silently then, as other commands of a terminal do, at any line. For commands that print last, or do nothing else."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
