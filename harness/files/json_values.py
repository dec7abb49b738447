"""What JSON and YAML files hold, under the two names that it has where it is read by key.

A value in such a tree has no type of its own. What is in it was checked before: records and manifests by `records.schema`,
configurations by `configure.typed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]  # a record, a manifest, or a part of one
Config = Mapping[str, Any]  # a resolved configuration, or a record that is only read
