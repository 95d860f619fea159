"""Who may import whom, held by walking every import statement of the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit import REPO

HYDRA = ("hydra", "omegaconf")
TIERS = ("filesystem", "object")
"""Packages of `backends.tier`: each is one tier. Its plain modules are what tiers share."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports. `lazy`: inside a function, or for the type checker alone."""

    name: str
    lazy: bool


class Tree:
    """The modules under one root, by dotted name."""

    def __init__(self, root: Path) -> None:
        files = [*root.glob("*.py"), *root.glob("backends/**/*.py")]
        files += root.glob("orchestrator/**/*.py")
        self.modules = {self._name(path.relative_to(root)): path for path in files}

    @staticmethod
    def _name(path: Path) -> str:
        parts = path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imports(self, module: str) -> list[Import]:
        path = self.modules[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        return list(self._walk(ast.parse(path.read_text()), package, lazy=False))

    def _walk(self, node: ast.AST, package: str, *, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                yield Import(base, lazy)
                yield from (Import(f"{base}.{alias.name}", lazy) for alias in child.names)
            else:
                later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from self._walk(child, package, lazy=lazy or later or typing_only)

    def reached(self, start: str) -> dict[str, str]:
        """Everything that importing `start` loads, and for each the module that asks for it."""
        found = {start: "the command line"}
        queue = [start]
        while queue:
            module = queue.pop()
            for imported in self.imports(module):
                if imported.lazy:
                    continue
                parts = imported.name.split(".")
                for length in range(1, len(parts) + 1):
                    name = ".".join(parts[:length])
                    if name not in found:
                        found[name] = module
                        if name in self.modules:
                            queue.append(name)
        return found


def is_of(name: str, *packages: str) -> bool:
    return name.split(".")[0] in packages


def violations(root: Path) -> list[str]:
    """Every import that the layering forbids, as `module imports name`."""
    tree = Tree(root)
    found = []
    for module in sorted(tree.modules):
        for name in sorted({imported.name for imported in tree.imports(module)}):
            if is_of(module, "backends"):
                wrong = is_of(name, "orchestrator", "launch", *HYDRA)
            elif is_of(module, "orchestrator"):
                wrong = is_of(name, "launch")
            else:
                wrong = False
            if wrong or between_tiers(module, name):
                found.append(f"{module} imports {name}")
    return found


def between_tiers(module: str, name: str) -> bool:
    """Whether one tier's module imports another's."""
    if not module.startswith("backends.tier.") or not name.startswith("backends.tier."):
        return False
    importer, imported = module.split(".")[2], name.split(".")[2]
    return importer in TIERS and imported in TIERS and imported != importer


def test_every_package_beside_the_shared_modules_is_held_to_be_a_tier() -> None:
    packages = (REPO / "backends" / "tier").glob("*/__init__.py")
    assert sorted(path.parent.name for path in packages) == sorted(TIERS)


def test_no_module_imports_what_its_layer_may_not() -> None:
    assert violations(REPO) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("backends/region.py", "from orchestrator.plan import Plan", "orchestrator.plan"),
        ("backends/region.py", "def f():\n    import hydra", "hydra"),
        ("backends/a/b.py", "from omegaconf import DictConfig as D", "omegaconf.DictConfig"),
        ("orchestrator/app.py", "import launch", "launch"),
        ("backends/tier/filesystem/a.py", "import backends.tier.object", "backends.tier.object"),
        ("backends/tier/filesystem/a.py", "from .. import object", "backends.tier.object"),
    ],
)
def test_the_walk_finds_each_kind_of_forbidden_import(
    tmp_path: Path, path: str, source: str, expected: str
) -> None:
    module = tmp_path / path
    module.parent.mkdir(parents=True)
    module.write_text(source + "\n")
    assert any(line.endswith(f" imports {expected}") for line in violations(tmp_path))


def test_a_tier_may_import_what_all_tiers_share(tmp_path: Path) -> None:
    folder = tmp_path / "backends" / "tier" / "object"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from backends.tier import base\nfrom backends.errors import X\n")
    assert violations(tmp_path) == []


@pytest.mark.parametrize("module", ["launch", "orchestrator.plan", "orchestrator.workload"])
def test_planning_reaches_no_torch(module: str) -> None:
    reached = Tree(REPO).reached(module)
    assert "torch" not in reached, f"{reached.get('torch')} imports torch when it is imported"


@pytest.mark.parametrize("module", ["orchestrator.worker", "orchestrator.spawn.zygote"])
def test_workers_reach_no_hydra(module: str) -> None:
    reached = Tree(REPO).reached(module)
    for package in HYDRA:
        assert package not in reached, f"{reached[package]} imports {package}"


def test_the_walk_follows_packages_and_leaves_out_functions(tmp_path: Path) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("import torch\n")
    (tmp_path / "backends" / "keys.py").write_text("def f():\n    import numpy\n")
    (tmp_path / "launch.py").write_text("import backends.keys\n")
    reached = Tree(tmp_path).reached("launch")
    assert reached["torch"] == "backends"
    assert "numpy" not in reached


SCRIPT = """
import contextlib, io, runpy, sys
for arguments in ({commands}):
    sys.argv = ["launch.py", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path({launch!r}, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (arguments, end.code)
    assert len(said.getvalue()) > 100, arguments
    loaded = [name for name in ("torch", "numpy") if name in sys.modules]
    assert not loaded, (arguments, loaded)
print("answered")
"""


def test_help_cfg_and_plan_answer_without_loading_torch_or_numpy(tmp_path: Path) -> None:
    commands = (["--help"], ["--cfg", "job"], ["action=plan", f"hydra.run.dir={tmp_path}/run"])
    script = SCRIPT.format(commands=", ".join(map(repr, commands)), launch=str(REPO / "launch.py"))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "answered\n", done.stderr
    assert (tmp_path / "run" / "plan.json").is_file()
