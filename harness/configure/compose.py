"""From overrides to a configuration, in one place: what the command composes, lm-eval, calibrations and Python compose too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.configure.hydra_errors import CompositionError, said
from harness.configure.overrides import STACK
from harness.errors import UserError
from harness.files.paths import CONF


@contextmanager
def composing() -> Iterator[None]:
    """Have Hydra ready with conf/: the running one, which knows the folders of --config-dir, or else one for this block.

    The Hydra of another program is put back afterwards.
    """
    if _is_ours():
        yield
        return
    other = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = other


def _is_ours() -> bool:
    running = GlobalHydra.instance()
    return running.is_initialized() and any(source.path == str(CONF) for source in running.config_loader().get_sources())


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that `python -m harness OVERRIDES` runs; its interpolations are not resolved yet.

    Raises:
        UserError: a member or a key that does not exist, a text that is no override.
    """
    with composing():
        try:
            return hydra.compose("config", overrides=list(overrides))
        except CompositionError as error:
            raise UserError(said(error)) from None


def compose_stack(name: str, changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A member of conf/compress with changes: (as it is written, interpolations resolved).

    Raises:
        UserError: as `compose`, and an interpolation of nothing; it starts with the stack's name.
    """
    try:
        found = compose([f"{STACK}={name}", *changes])[STACK]
        return OmegaConf.to_container(found), OmegaConf.to_container(found, resolve=True)  # type: ignore[return-value]
    except (UserError, *CompositionError) as error:
        raise UserError(f"stack {name!r}: {error if isinstance(error, UserError) else said(error)}") from None
