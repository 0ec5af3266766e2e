"""The names that users may rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import gpipebal

PUBLIC = [
    "Device",
    "DeviceRates",
    "GPipe",
    "GpipebalError",
    "InfeasibleError",
    "Link",
    "Plan",
    "Profile",
    "Rules",
    "Timeline",
    "UnsupportedPlanError",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "compare_rules",
    "compare_schedules",
    "evaluate",
    "flatten",
    "is_checkpointing",
    "is_recomputing",
    "match_profile",
    "profile_model",
    "select_method",
    "simulate",
    "solve",
    "solve_grid",
    "top_plans",
    "trace",
    "verify",
]


def test_public_names_are_exactly_these() -> None:
    """A public name is added or removed on purpose, never by accident."""
    assert gpipebal.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_docstring(name: str) -> None:
    """Every public name says in its own docstring what it is for."""
    value = getattr(gpipebal, name)
    assert value.__doc__ and value.__doc__.strip()
    if inspect.isclass(value):
        assert "__doc__" in vars(value)
        # A dataclass without a docstring gets its signature as one.
        assert not value.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_listed_by_dir(name: str) -> None:
    """Completion in a notebook offers every public name."""
    assert name in dir(gpipebal)


def test_every_module_is_reachable_by_name() -> None:
    """`gpipebal.plots` works without importing it first, and so does every other module."""
    root = Path(gpipebal.__file__).parent
    files = {path.stem for path in root.glob("*.py")}
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    names = sorted((files | packages) - {"__init__", "__main__"})
    assert set(names) <= set(dir(gpipebal)) and "__main__" not in dir(gpipebal)
    # In another process, where nothing has imported them.
    code = f"import gpipebal; print([n for n in {names} if not hasattr(gpipebal, n)])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is refused as Python does it."""
    with pytest.raises(AttributeError, match="module 'gpipebal' has no attribute 'pipline'"):
        _ = gpipebal.pipline


def test_version_is_readable_without_torch() -> None:
    """The version is known before anything heavy is imported."""
    code = "import sys, gpipebal; print(gpipebal.__version__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [gpipebal.__version__, "False"]
