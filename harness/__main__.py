"""Compose the configuration, instantiate it once, run, report. It reads like a table of contents."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports make hundreds of thousands of objects, all of which stay: looking for garbage among them takes long

import os
import sys

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness import usage
from harness.command import execute
from harness.configure.arguments import check_arguments, is_sweep
from harness.configure.hydra_errors import CompositionError, said
from harness.errors import UserError
from harness.evaluation.process import keep_memory
from harness.files.paths import CONF
from harness.files.pipes import end_with_reader
from harness.sweep import job
from harness.sweep.fold import deferred
from harness.sweep.sweeper import register

FULL_ERROR = "HYDRA_FULL_ERROR"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    """One run; the last printed line is its folder. In a sweep it is one job of many, and its folder says how it went."""
    # As typed: Hydra would resolve ${...} in them.
    overrides: list[str] = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # type: ignore[assignment]
    place = job.folder()
    if place is not None:
        job.run(place, lambda: execute(cfg, overrides))
        return
    try:
        folder, failed = execute(cfg, overrides)
    except (UserError, OmegaConfBaseException) as error:
        sys.exit(f"error: {error if isinstance(error, UserError) else said(error)}")
    except SystemExit as ended:
        sys.exit(f"error: a part of this run called exit({ended.code}): finished records are safe, but there is no report")
    except KeyboardInterrupt:
        sys.exit("interrupted: finished records are safe, the same command goes on from there")
    print(folder)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    gc.enable()
    keep_memory()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if usage.asked(sys.argv[1:]):
        end_with_reader()
        print(usage.page(sys.argv[1:]))
        sys.exit(0)
    # Hydra reads flags before or after all overrides, but not between them.
    overrides = get_args_parser().parse_intermixed_args(sys.argv[1:]).overrides
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in overrides] + overrides
    try:
        check_arguments(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    if is_sweep(sys.argv[1:]):
        sys.argv[1:] = deferred(sys.argv[1:])
    register()
    wants_trace = os.environ.get(FULL_ERROR, "0") == "1"
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its errors, instead of printing them in ten lines
    try:
        main()
    except CompositionError as error:
        if wants_trace:
            raise
        sys.exit(f"error: {said(error)}")
