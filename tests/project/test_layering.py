"""The import order of docs/architecture.md, read from the source and not from a picture."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import gpipebal

ROOT = Path(gpipebal.__file__).parent
MAX_LINES = 400
HEAVY = ("torch", "pandas", "scipy", "matplotlib")

#: Rank of every module or package directly below gpipebal: arrows point to lower ranks only.
RANKS = {
    "argument_kinds": 0,
    "contents": 0,
    "errors": 0,
    "units": 0,
    "files": 0,
    "objectives": 0,
    "records": 0,
    "html": 0,
    "text": 0,
    "profile": 1,
    "rates": 1,
    "plan": 1,
    "schedule": 1,
    "timeline": 1,
    "problem": 2,
    "simulator": 2,
    "memory": 2,
    "solvers": 3,
    "planner": 3,
    "schedule_comparison": 3,
    "copies": 4,
    "profiler": 4,
    "pipeline": 4,
    "skip": 4,
    "models": 4,
    "balance": 5,
    "plots": 5,
    "report": 5,
    "run": 5,
    "side_by_side": 5,
    "tables": 5,
    "verification": 5,
    "cli": 6,
    "compat": 6,
    "__main__": 6,
}

#: The arrows that are allowed inside one rank.
WITHIN_RANK = {
    ("files", "errors"),
    ("files", "argument_kinds"),
    ("argument_kinds", "errors"),
    ("argument_kinds", "text"),
    ("objectives", "errors"),
    ("objectives", "units"),
    ("records", "errors"),
    ("units", "errors"),
    ("html", "text"),
    ("html", "units"),
    ("plan", "schedule"),
    ("timeline", "schedule"),
    ("memory", "problem"),
    ("simulator", "memory"),
    ("simulator", "problem"),
    ("planner", "solvers"),
    ("schedule_comparison", "planner"),
    ("schedule_comparison", "solvers"),
    ("pipeline", "skip"),
    ("models", "skip"),
    ("profiler", "copies"),
    ("profiler", "pipeline"),
    ("profiler", "skip"),
    ("run", "report"),
    ("run", "plots"),
    ("__main__", "cli"),
}

FILES = sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)


def _part(path: Path) -> str:
    """Return the name of the module or package below gpipebal that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def _imported(path: Path) -> frozenset[str]:
    """Return the dotted names of all modules that a file imports, wherever in the file."""
    package = ["gpipebal", *path.relative_to(ROOT).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from gpipebal import plots` imports a module too.
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return frozenset(names)


def _parts_imported(path: Path) -> set[str]:
    """Return the modules and packages below gpipebal that a file imports, but not its own."""
    dotted = [name.split(".") for name in _imported(path)]
    parts = {name[1] for name in dotted if name[0] == "gpipebal" and len(name) > 1}
    return (parts & RANKS.keys()) - {_part(path)}


def test_every_part_has_a_rank() -> None:
    """What is added directly below gpipebal gets a rank, here and in docs/architecture.md."""
    assert {_part(path) for path in FILES} - {"__init__"} == RANKS.keys()


def test_imports_point_down() -> None:
    """A module imports only from lower ranks, or along an arrow that its own rank allows."""
    wrong = [
        f"{path.relative_to(ROOT)} (rank {RANKS[part]}) imports {other} (rank {RANKS[other]})"
        for path in FILES
        if (part := _part(path)) != "__init__"
        for other in _parts_imported(path)
        if RANKS[other] >= RANKS[part] and (part, other) not in WITHIN_RANK
    ]
    assert not wrong


#: The folders of the executor, from the first: each imports only from those before it.
PIPELINE = (
    *("values", "process", "randomness", "observers"),
    *("layers", "workers", "minibatch", ""),
)


def test_imports_inside_the_pipeline_point_down() -> None:
    """A folder of the executor imports from itself and from those below it on the map."""
    inside = [path for path in FILES if _part(path) == "pipeline" and path.name != "__init__.py"]
    wrong = []
    for path in inside:
        parents = path.relative_to(ROOT / "pipeline").parts[:-1]
        here = PIPELINE.index(parents[0] if parents else "")
        for name in _imported(path):
            *front, folder = name.split(".")[:3]
            if front == ["gpipebal", "pipeline"] and folder in PIPELINE[here + 1 :]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert inside and not wrong


@cache
def _defined(path: Path) -> frozenset[str]:
    """Return the names of all functions, classes and variables that a file makes."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    stored = (node for node in nodes if isinstance(node, ast.Name))
    return frozenset(
        {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        | {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    )


def test_names_are_imported_from_their_home() -> None:
    """What a file imports from a module is defined there: only packages hand names on."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {alias.name} from {node.module}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        if (home := ROOT.parent.joinpath(*node.module.split(".")).with_suffix(".py")).is_file()
        for alias in node.names
        if alias.name not in _defined(home)
    ]
    assert not wrong


def test_torch_stays_at_the_top() -> None:
    """Nothing below rank 4 imports torch, so that a saved profile is planned without it."""
    below = [path for path in FILES if RANKS.get(_part(path), 6) < 4]
    heads = {path: {name.split(".")[0] for name in _imported(path)} for path in below}
    assert heads and [path for path in below if "torch" in heads[path]] == []


def test_files_stay_small() -> None:
    """No file is longer than 400 lines."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_package_init_imports_nothing_eagerly() -> None:
    """The package itself imports its modules only for type checkers, and on first use."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    eager = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module for node in eager if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "importlib", "typing"}
    assert len(eager) == len(modules)


PLANNING = ", ".join(f"gpipebal.{part}" for part, rank in sorted(RANKS.items()) if rank < 4)


@pytest.mark.parametrize("modules", ["gpipebal", "gpipebal.solvers", PLANNING, "gpipebal.cli"])
def test_import_loads_nothing_heavy(modules: str) -> None:
    """Importing all below rank 4, or the command line, loads no torch, pandas, or the like."""
    code = (
        f"import sys, {modules}\n"
        f"print(sorted(set({HEAVY!r}) & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
