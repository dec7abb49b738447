"""Reading on: what was appended to the shards of a run folder since the last look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.files.json_values import Json
from harness.records.shards import content, parsed, shards


class Following:
    """The records of a folder as they come: shards only grow, so where the last look ended is where the next one begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}  # bytes of each shard that were read

    def fresh(self, but: Path | None = None) -> Iterator[Json]:
        """Records that were not read yet, whole lines only; not those of the shard `but`."""
        for shard in shards(self.folder):
            start = self._read.get(shard, 0)
            if shard == but or shard.lstat().st_size == start:
                continue
            data = content(shard, start)
            end = data.rfind(b"\n") + 1
            self._read[shard] = start + end
            yield from (record for _, record in parsed(data[:end].split(b"\n")) if isinstance(record, dict))
