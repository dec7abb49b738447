"""How fast one sequence is read and decoded under each stack, alone: an axis of its own, never that of bytes."""
