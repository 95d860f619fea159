"""What tests of several folders share: configurations and plans made the way `launch.py` does."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from orchestrator.compose import register, to_config
from orchestrator.plan import Plan, RunInfo, make_plan, write_plan
from orchestrator.rundir import new_run_id
from orchestrator.schema import Config
from orchestrator.validate import validate

REPO = Path(__file__).resolve().parents[1]
CONF = REPO / "conf"


def compose_config(*overrides: str) -> Config:
    """The configuration that `python launch.py OVERRIDES` would be given."""
    register()
    OmegaConf.register_new_resolver("kvquay.run_id", new_run_id, replace=True)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_config(compose("config", overrides=list(overrides)))


def plan_for(run_dir: Path, *overrides: str) -> Plan:
    """A validated plan, written to `run_dir`."""
    config = compose_config(*overrides)
    checked = validate(config, run_dir)
    run = RunInfo(new_run_id(), str(run_dir), 0.0)
    plan = make_plan(config, checked.topology, checked.model, checked.groups, run)
    write_plan(plan, run_dir)
    return plan
