"""Errors: one base, and the builtin that users expect."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

from gpipebal import errors
from gpipebal.errors import GpipebalError

CLASSES = [getattr(errors, name) for name in errors.__all__]

BUILTINS = {
    "BalanceError": (ValueError,),
    "DeviceError": (ValueError, IndexError),
    "DuplicateLayerError": (ValueError,),
    "FileFormatError": (ValueError,),
    "InfeasibleError": (ValueError,),
    "KindError": (TypeError,),
    "MissingFileError": (ValueError, FileNotFoundError),
    "ModelError": (TypeError,),
    "PipelineError": (RuntimeError,),
    "PipelineTimeoutError": (RuntimeError, TimeoutError),
    "ProfileError": (ValueError,),
    "RowsError": (TypeError, ValueError),
    "UnsupportedPlanError": (ValueError,),
    "UsageError": (ValueError,),
    "VerificationError": (AssertionError,),
}


@pytest.mark.parametrize("error", CLASSES, ids=lambda e: e.__name__)
def test_error_is_a_gpipebal_error(error: type[Exception]) -> None:
    """`except GpipebalError` catches everything that gpipebal raises on purpose."""
    assert issubclass(error, GpipebalError)
    assert error.__doc__


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_error_is_the_builtin_that_users_expect(name: str) -> None:
    """`except ValueError` and the like read naturally too."""
    error = getattr(errors, name)
    assert all(issubclass(error, builtin) for builtin in BUILTINS[name])
    with pytest.raises(BUILTINS[name][-1], match="broken"):
        raise error("broken")


def test_every_error_is_listed() -> None:
    """Each class of the module is public, and has its builtin stated in this test."""
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, GpipebalError)
    }
    assert defined == set(errors.__all__) == {"GpipebalError", *BUILTINS}


#: Builtins that are raised all the same, by file: an attribute is looked up as Python does it, a
#: mapping has no such key; or the error is caught in the file, and becomes one of ours.
ASKED_FOR = {
    "compat/torchgpipe/gpipe.py": {"AttributeError"},
    "files.py": {"ValueError"},
    "__init__.py": {"AttributeError"},
    "models/__init__.py": {"AttributeError"},
    "pipeline/layers/batchnorm.py": {"ValueError"},  # as torch's own layers refuse an input
    "pipeline/layers/container.py": {"AttributeError"},
    "pipeline/randomness/random_ops.py": {"RuntimeError"},
    "schedule/__init__.py": {"AttributeError"},
    "schedule/known.py": {"KeyError"},
}


def test_builtins_are_raised_only_where_python_asks_for_them() -> None:
    """What the package refuses, it refuses with an error of its own."""
    root = Path(errors.__file__).parent
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = node.exc if isinstance(node, ast.Raise) else None
            made = made.func if isinstance(made, ast.Call) else made
            if isinstance(made, ast.Name) and hasattr(builtins, made.id):
                found.setdefault(path.relative_to(root).as_posix(), set()).add(made.id)
    assert found == ASKED_FOR
