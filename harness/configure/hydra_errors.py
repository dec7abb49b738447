"""Says in one line what Hydra could not compose."""

from __future__ import annotations

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.configure.overrides import NO_OVERRIDE

CompositionError = (HydraException, OmegaConfBaseException)


def said(error: BaseException) -> str:
    """What was asked for and what there is instead, from an error that Hydra or OmegaConf raised."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} {NO_OVERRIDE}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name} is not there: {', '.join(error.options)}"
    cause = error.__cause__ or error
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        parent, keys = str(cause.full_key).rpartition(".")[0], sorted(map(str, cause.parent_node))
        legal = ", ".join(key for key in keys if key != "hydra" and not key.startswith("_")) or "no keys"
        return f"{cause.full_key} is not a key: {f'{parent} has' if parent else 'there are'} {legal}"
    return " ".join(str(error).split("Config search path")[0].split())
