"""Between Hydra and the frozen dataclasses of `schema`. Only the launcher imports it."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.overrides import explain
from orchestrator.problems import ConfigProblems
from orchestrator.schema import Config


def _thaw(node: DictConfig) -> DictConfig:
    """OmegaConf marks nodes of frozen classes read-only, which overrides could not change.

    Hydra refuses new keys; those of a mapping are values, and the schema has none of them.
    """
    OmegaConf.set_readonly(node, None)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            _thaw(child)
    return node


def register() -> None:
    """Make the schema known to Hydra as `schema`, the first entry of the defaults list."""
    ConfigStore.instance().store("schema", node=_thaw(OmegaConf.structured(Config)))


def to_config(cfg: DictConfig) -> Config:
    """The composed configuration as frozen dataclasses.

    Raises ConfigProblems where a value is missing or an interpolation cannot be resolved.
    """
    try:
        config: Any = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigProblems([explain(error)]) from error
    assert isinstance(config, Config), type(config)
    return config
