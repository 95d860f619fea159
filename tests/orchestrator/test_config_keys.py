"""The keys that users and their scripts rely on, with types and defaults, held by a golden file."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from typing import Any

from backends.tier.registry import TierRegistry
from orchestrator.lower_tiers import PRIMARY
from orchestrator.model import KvGroupConf
from orchestrator.overrides import schema_fields
from orchestrator.schema import StackConf
from orchestrator.values import ADDRESSES, CHOICES, RANGES, SIZES, leaves
from tests.kit import REPO, compose_config

GOLDEN = REPO / "tests" / "golden" / "config_keys.txt"


def shown_type(hint: Any) -> str:
    text = str(hint) if typing.get_args(hint) else hint.__name__
    text = re.sub(r"typing\.Optional\[(.*)\]$", r"\1 | None", text)
    return text.replace(f"{KvGroupConf.__module__}.", "")


def surface() -> list[str]:
    """A line for each key: its type and what `python launch.py` alone gives it."""
    hints = schema_fields()
    lines = [f"{key}: {shown_type(hints[key])} = {v!r}" for key, v in leaves(compose_config())]
    entries = schema_fields(KvGroupConf, "model.groups[].")
    defaults = leaves(KvGroupConf(), "model.groups[].")
    return lines + [f"{key}: {shown_type(entries[key])} = {v!r}" for key, v in defaults]


def test_the_configuration_is_what_users_rely_on() -> None:
    before, now = GOLDEN.read_text().splitlines(), surface()
    difference = "\n".join(difflib.unified_diff(before, now, "golden", "now", lineterm="", n=0))
    assert not difference, (
        f"keys, types or defaults of the configuration changed:\n{difference}\n"
        "A key that is gone or means something else breaks users' scripts. If it is meant, say so "
        "in CHANGELOG.md and write the golden file anew: "
        "python -m tests.orchestrator.test_config_keys"
    )


def test_every_checked_key_is_a_key() -> None:
    keys = {key for key, _ in leaves()}
    assert {*CHOICES, *SIZES, *RANGES, *ADDRESSES} <= keys


def test_every_choice_and_number_has_a_check() -> None:
    """A new key is not forgotten: text is free only where it is listed here."""
    free_text = {"workload.salt", "workload.path", "tiers.stack.shm.eviction", "events.topic"}
    # vLLM says itself what it cannot load, or not run with.
    free_text |= {"engine.model", "engine.vllm.load_format"}
    # What they name is read by `check_simulation`.
    free_text |= {"simulate.doctor", "simulate.compare"}
    elsewhere = ("model.", "workload.", "clean.", "parallel.nodes")
    elsewhere += ("tiers.stack.fs.", "tiers.stack.object.", "tiers.edges.")
    for key, hint in schema_fields().items():
        if dataclasses.is_dataclass(hint) or key.startswith(elsewhere) or key in free_text:
            continue
        is_list_or_flag = hint is bool or "list" in str(hint)
        checked = {*CHOICES, *SIZES, *RANGES, *ADDRESSES}
        assert is_list_or_flag or key in checked, f"{key} is checked nowhere"


def test_everything_that_a_lower_tier_can_be_told_is_a_key_with_the_same_default() -> None:
    for name, conf in typing.get_type_hints(StackConf).items():
        if name == PRIMARY:
            continue
        entry = TierRegistry().find(name)
        given = dataclasses.asdict(conf())
        keys = [field.name for field in dataclasses.fields(entry.settings_type)]
        assert list(given) == keys, f"tiers.stack.{name}"
        required = {
            field.name: given[field.name]
            for field in dataclasses.fields(entry.settings_type)
            if field.default is field.default_factory is dataclasses.MISSING
        }
        assert entry.settings(given) == entry.settings(required), f"tiers.stack.{name}"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(surface()) + "\n")
    print(f"wrote {GOLDEN}")
