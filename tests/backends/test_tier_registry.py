"""Tiers by name: found, refused, and their settings checked before anything is opened."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, Literal

import pytest

from backends.errors import ConfigError, TierError
from backends.testing import MemorySettings, MemoryTier, RowBuffer, make_context
from backends.tier.registry import BUILTIN, GROUP, Builtin, TierRegistry
from backends.tier.settings import SettingsError, SettingsProblem, Size, convert_settings

REPO = Path(__file__).resolve().parents[2]
MEMORY = "backends.testing.memory:MemoryTier"

OWN_TIER = """
from dataclasses import dataclass
from backends.testing import MemorySettings, MemoryTier

class OwnTier(MemoryTier):
    name = "own"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a distribution with an entry point and a module on the path, as pip would."""

    def install(name: str, points: Mapping[str, str], modules: Mapping[str, str]) -> None:
        site = tmp_path / name
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {target}" for point, target in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    return install


def entry_points(path: Path) -> list[EntryPoint]:
    found = distributions(path=[str(path)])
    return [point for each in found for point in each.entry_points.select(group=GROUP)]


def test_our_own_tiers_can_be_loaded() -> None:
    registry = TierRegistry(entry_points=[])
    assert registry.names() == tuple(sorted(BUILTIN))
    for name in registry.names():
        entry = registry.find(name)
        assert entry.origin == "kvquay itself"
        factory = EntryPoint(name, entry.target, GROUP).load()
        assert factory.settings_type is entry.settings_type


def test_a_tier_is_opened_with_its_settings() -> None:
    memory = Builtin(MEMORY, "backends.testing.memory:MemorySettings")
    entry = TierRegistry({"memory": memory}, []).find("memory")
    settings = entry.settings({"capacity": "1GiB"})
    assert settings == MemorySettings(capacity=1 << 30)
    tier = entry.open(make_context(RowBuffer(1, 8192)), settings)
    assert isinstance(tier, MemoryTier)
    assert tier.usage().capacity_bytes == 1 << 30
    tier.close()


def test_settings_of_another_type_open_nothing() -> None:
    memory = Builtin(MEMORY, "backends.testing.memory:MemorySettings")
    entry = TierRegistry({"memory": memory}, []).find("memory")
    with pytest.raises(TierError, match="settings of type dict, expected MemorySettings"):
        entry.open(make_context(RowBuffer(1, 8192)), {"capacity": 1})


def test_a_tier_of_a_users_own_is_found_by_entry_point(install: Any) -> None:
    install("own-tier", {"own": "own_tier:OwnTier"}, {"own_tier": OWN_TIER})
    registry = TierRegistry()
    assert "own" in registry.names()
    entry = registry.find("own")
    assert entry.origin == "distribution own-tier 1.0"
    tier = entry.open(make_context(RowBuffer(1, 8192)), entry.settings({}))
    assert tier.name == "own"
    tier.close()


def test_finding_names_imports_nothing(install: Any) -> None:
    install("own-tier", {"own": "never_imported:X"}, {"never_imported": "raise SystemExit(3)"})
    assert "own" in TierRegistry().names()
    assert "never_imported" not in sys.modules


def test_settings_of_our_tiers_are_checked_without_numpy() -> None:
    script = (
        "import sys; from backends.tier.registry import TierRegistry; "
        "registry = TierRegistry(entry_points=[]); "
        "entries = [registry.find(name) for name in registry.names()]; "
        "print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_an_unknown_name_is_told_with_a_suggestion() -> None:
    registry = TierRegistry({"filesystem": Builtin(MEMORY, MEMORY)}, [])
    with pytest.raises(TierError, match="there is no tier 'filesytem'; did you mean 'filesystem'"):
        registry.find("filesytem")


def test_a_name_is_never_an_import_path() -> None:
    with pytest.raises(TierError, match="there is no tier"):
        TierRegistry({}, []).find("backends.testing.memory:MemoryTier")


def test_two_distributions_that_claim_a_name_are_both_told(install: Any, tmp_path: Path) -> None:
    for name in ("first-one", "second-one"):
        install(name, {"same": f"{name[:5]}:Tier"}, {})
    points = entry_points(tmp_path / "first-one") + entry_points(tmp_path / "second-one")
    registry = TierRegistry({}, points)
    with pytest.raises(TierError) as caught:
        registry.find("same")
    assert "claimed by distribution first-one 1.0 (first:Tier)" in str(caught.value)
    assert "distribution second-one 1.0 (secon:Tier)" in str(caught.value)


def test_our_names_cannot_be_taken(install: Any, tmp_path: Path) -> None:
    install("own-tier", {"fs": "own_tier:OwnTier"}, {"own_tier": OWN_TIER})
    registry = TierRegistry(entry_points=entry_points(tmp_path / "own-tier"))
    with pytest.raises(TierError, match=r"claimed by kvquay itself .* distribution own-tier 1\.0"):
        registry.find("fs")


def test_a_clash_elsewhere_does_not_matter(install: Any, tmp_path: Path) -> None:
    install("own-tier", {"fs": "own_tier:X", "own": MEMORY}, {})
    registry = TierRegistry(entry_points=entry_points(tmp_path / "own-tier"))
    assert registry.find("own").settings_type is MemorySettings


@pytest.mark.parametrize(
    ("target", "source", "reason"),
    [
        ("absent_module:X", "", "ModuleNotFoundError: No module named 'absent_module'"),
        ("broken:X", "", "AttributeError: module 'broken' has no attribute 'X'"),
        ("broken:X", "def f(:", "SyntaxError"),
        ("broken:X", "raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("broken:X", "X = 3", "is not a tier factory"),
        ("broken:X", "def X(context, settings): ...", "is not a tier factory"),
        ("broken:X", "class X:\n    settings_type = dict", "expected a frozen dataclass"),
        (
            "broken:X",
            "import dataclasses\n@dataclasses.dataclass\nclass S: ...\n"
            "class X:\n    settings_type = S",
            "has settings_type S, expected a frozen dataclass",
        ),
    ],
)
def test_a_broken_entry_point_is_told_with_its_distribution(
    install: Any, monkeypatch: pytest.MonkeyPatch, target: str, source: str, reason: str
) -> None:
    install("bad-tier", {"bad": target}, {"broken": source})
    try:
        with pytest.raises(TierError) as caught:
            TierRegistry().find("bad")
    finally:
        sys.modules.pop("broken", None)
    assert f"tier 'bad' of distribution bad-tier 1.0 ({target})" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('disk on fire')", "cannot be opened: OSError: disk on fire"),
        ("return 3", "gave a int, expected a backends.tier.base.Tier"),
    ],
)
def test_a_tier_that_does_not_open_is_told_with_its_distribution(
    install: Any, source: str, reason: str
) -> None:
    module = textwrap.dedent(
        f"""
        from backends.testing import MemorySettings
        def make(context, settings):
            {source}
        make.settings_type = MemorySettings
        """
    )
    install("bad-tier", {"bad": "opens_badly:make"}, {"opens_badly": module})
    entry = TierRegistry().find("bad")
    try:
        with pytest.raises(TierError, match=r"of distribution bad-tier 1\.0") as caught:
            entry.open(make_context(RowBuffer(1, 8192)), MemorySettings())
    finally:
        sys.modules.pop("opens_badly", None)
    assert reason in str(caught.value)


@dataclass(frozen=True)
class Retry:
    attempts: int = 3
    pause_s: float = 0.5


@dataclass(frozen=True)
class Example:
    path: str
    capacity: Size | None = None
    queue: Size = 1 << 20
    threads: int = 4
    durability: Literal["none", "data", "full"] = "none"
    roots: tuple[str, ...] = ()
    retry: Retry = field(default_factory=Retry)
    fallback: Retry | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}, expected at least 1")


def test_plain_data_becomes_settings() -> None:
    given = {
        "path": "/data",
        "capacity": "1.5GiB",
        "queue": 4096,
        "durability": "full",
        "roots": ["/a", "/b"],
        "retry": {"pause_s": 2},
        "fallback": {"attempts": 1},
    }
    assert convert_settings(Example, given) == Example(
        path="/data",
        capacity=3 << 29,
        queue=4096,
        durability="full",
        roots=("/a", "/b"),
        retry=Retry(pause_s=2.0),
        fallback=Retry(attempts=1),
    )


def problems(given: Mapping[str, Any]) -> dict[str, SettingsProblem]:
    with pytest.raises(SettingsError) as caught:
        convert_settings(Example, given)
    return {problem.key: problem for problem in caught.value.problems}


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        {
            "capasity": "1GiB",
            "threads": "4",
            "durability": "ful",
            "queue": "lots",
            "roots": "/a",
            "retry": {"attempts": True, "pauses": 1},
            "fallback": {"attempt": 1},
        }
    )
    assert set(found) == {
        "capasity",
        "path",
        "threads",
        "durability",
        "queue",
        "roots",
        "retry.attempts",
        "retry.pauses",
        "fallback.attempt",
    }
    assert found["capasity"].fix == "did you mean 'capacity'?"
    assert found["path"].expected == "it has to be given: str"
    assert found["threads"].value == "4"
    assert found["threads"].expected == "expected int (Expected `int`, got `str`)"
    assert found["durability"].expected == "expected one of none, data, full"
    assert found["durability"].fix == "did you mean 'full'?"
    assert "such as 512MiB" in found["queue"].fix
    assert found["retry.pauses"].fix == "did you mean 'pause_s'?"
    assert found["fallback.attempt"].fix == "did you mean 'attempts'?"


def test_what_the_dataclass_refuses_is_told() -> None:
    assert problems({"path": "/", "threads": 0})[""].expected == (
        "threads is 0, expected at least 1"
    )


def test_the_message_has_dotted_keys_from_where_the_settings_stand() -> None:
    with pytest.raises(SettingsError, match=r"^tiers\.stack\.fs\.retry\.pauses: there is no such"):
        convert_settings(Example, {"path": "/", "retry": {"pauses": 1}}, "tiers.stack.fs")


def test_the_value_of_an_unknown_key_is_kept_to_ourselves() -> None:
    with pytest.raises(SettingsError) as caught:
        convert_settings(Example, {"path": "/", "secret_key": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "secret_key" in str(caught.value)
