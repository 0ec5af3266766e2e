"""Errors: one base, and the builtin that users expect."""

from __future__ import annotations

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
    "ModelError": (TypeError,),
    "PipelineError": (RuntimeError,),
    "PipelineTimeoutError": (RuntimeError, TimeoutError),
    "ProfileError": (ValueError,),
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
