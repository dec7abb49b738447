"""Slow, plain statements of the compression rules; they know nothing of the harness and share no code with it."""
