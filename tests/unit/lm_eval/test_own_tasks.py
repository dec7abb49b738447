"""Settings of our tasks under plain lm-eval come from its command line: they are checked as everywhere, and name no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from tasks.lm_eval_yaml import kv_data


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"lengths": "long"}, r"^task: task\.lengths='long' is not possible"),
        ({"per_cell": 2.5}, r"^task: task\.per_cell=2\.5 is not possible: a whole number"),
        ({"kind": "colour"}, r"^task: .*kind='colour' is not possible"),
        ({"corpus": "nosuch"}, r"^metadata corpus='nosuch' is not possible: one of "),
        ({"seed": "one"}, r"^metadata seed='one' is not possible: a whole number"),
        ({}, "name one with --model_args"),
    ],
)
def test_a_setting_that_is_not_possible_is_one_line(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        kv_data.needle(**metadata)
    assert "\n" not in str(caught.value)


def test_a_setting_is_a_value_and_never_a_call(tmp_path: Path) -> None:
    """The kind: data that names what is to be called, where a list or a text is expected."""
    call = {"_target_": "os.mkdir", "path": str(tmp_path / "made")}
    for key in ("stop", "lengths", "question", "_target_"):
        with pytest.raises(UserError):
            kv_data.needle(**{key: call})
    assert not list(tmp_path.iterdir())
