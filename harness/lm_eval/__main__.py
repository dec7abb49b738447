"""`python -m harness.lm_eval run --model kv_harness ...`: our model under lm-eval's own command line.

lm-eval finds models in its registry only, and discovers no plug-ins: so this registers `kv_harness`, then hands over. One
stack at a time; many at once are `python -m harness task=lm_eval`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from harness.errors import UserError, require
from harness.files.remote_code import no_remote_code
from harness.lm_eval.model import MODEL, OWN, settings


def main(arguments: Sequence[str] | None = None) -> None:
    """lm-eval's command line with our model registered; a user's mistake ends in one line."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    if arguments is not None:
        sys.argv[1:] = list(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    setup_logging()
    command = HarnessCLI()
    parsed = command.parse_args()
    try:
        if getattr(parsed, "model", None) == MODEL:
            _prepare(parsed)
        with no_remote_code():  # of our model nothing is run, and no task may ask for more
            command.execute(parsed)
    except UserError as error:
        sys.exit(f"error: {error}")


def _prepare(parsed: Any) -> None:
    """Refuse lm-eval's response cache, and tell tasks that make their own data which tokenizer is meant.

    RULER's tasks would take `model=smollm2` for a hub repository.
    """
    require(not parsed.use_cache, "use_cache", parsed.use_cache, "lm-eval's response cache knows neither model nor stack")
    given = dict(parsed.model_args or {})
    ours = {key: value for key, value in given.items() if key not in OWN}
    given.setdefault("tokenizer", str(settings(ours).spec.directory(weights=False)))
    parsed.model_args = given


if __name__ == "__main__":
    main()
