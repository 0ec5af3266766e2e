"""Refused: what to say where a layer or a loss runs only on tensors with values."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.profiler.chain.failures import (
    forbids_hooks,
    line_of,
    runs_functions,
    text_of,
)
from gpipebal.profiler.estimate.backends import acting_as

__all__ = ["needs_values", "without_values"]

#: The error of torch where stand-ins meet tensors with values.
_OTHER_DEVICE = re.compile(
    r"same device|expected device \w+ but got|not on the expected device", re.IGNORECASE
)
#: What an error says of a layer or a loss that only values are missing for.
_REFUSED = "cannot be estimated: "
_MEASURE = "profile_model(model, sample, method='measure')"
_WITHOUT_VALUES = (
    "or give the sample without what needs its values, such as a padding mask "
    "(docs/guide/huggingface.md)"
)


def needs_values(error: ProfileError) -> bool:
    """Tell whether an error says that an estimate cannot follow, and not that something failed."""
    return _REFUSED in str(error)


@contextmanager
def without_values(what: str, instead: str = "") -> Iterator[None]:
    """Explain a failure that is only due to missing values.

    Args:
        what: What runs in the block, for the error.
        instead: What else can be done than to measure, as the beginning of a fix.

    Raises:
        ProfileError: it failed.
    """
    try:
        yield
    except ProfileError as error:
        cause = error.__cause__
        if not isinstance(cause, Exception) or isinstance(cause, GpipebalError):
            raise
        if forbids_hooks(cause):
            raise
        why = _why(cause)
        if why is not None:
            reason, fix = why
            raise ProfileError(f"{what} {_REFUSED}{reason}.\nFix: {instead}{fix}.") from cause
        text, operation = str(error), _operation_of(cause)
        if operation:
            found, _, fix = text.rpartition("\nFix: ")
            raise ProfileError(
                f"{found}\nFix: {instead}if the plain model can be trained so, torch refuses "
                f"{operation} only on tensors without values: {_MEASURE}; otherwise {fix}"
            ) from cause
        raise ProfileError(
            f"{text}\nIf the plain model can be trained so, only the estimate cannot follow it: "
            f"{_MEASURE}."
        ) from cause


def _why(cause: Exception) -> tuple[str, str] | None:
    """Say what values are missing for, and what to do; None: perhaps none are missing."""
    text, kind, operation = text_of(cause).strip(), type(cause).__name__, _operation_of(cause)
    first, _, _ = text.partition("\n")
    if _OTHER_DEVICE.search(text):
        return (
            "it uses a tensor that is not its own parameter, buffer or attribute, and that needs a "
            f"gradient or cannot be found, so that no stand-in takes its place: {kind}: {first} "
            "(expected only its own)",
            f"register the tensor with the layer, or with a module that is the loss; or {_MEASURE}",
        )
    if runs_functions(cause):
        return (
            "it runs an operation that is given functions, such as torch.cond: "
            f"{kind} (expected operations on tensors alone)",
            f"{_MEASURE}; or give costs of your own, gpipebal.Profile.from_costs(forward=[...])",
        )
    is_unknown = isinstance(cause, NotImplementedError) or "no fake impl" in text
    if operation and is_unknown:
        of_torch = operation.startswith("aten::")
        registered = f"torch.library.register_fake({operation!r}, ...), which says it; or "
        return (
            f"torch does not know, without values, what {operation} makes{line_of(cause)}: {kind} "
            "(expected operations on shapes alone)",
            f"{'' if of_torch else registered}{_MEASURE}",
        )
    if "meta" in text.lower():
        return (
            "it reads values of tensors, or runs an operation that knows no shapes without them"
            f"{line_of(cause)}: {kind}: {first} (expected operations on shapes alone)",
            f"{_MEASURE}; {_WITHOUT_VALUES}",
        )
    return None


def _operation_of(error: Exception) -> str:
    """Return the name of the operation that failed on tensors without values; empty: none did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        is_ours = frame.f_globals.get("__name__") == acting_as.__module__
        if is_ours and frame.f_code.co_name == "__torch_dispatch__":
            return str(frame.f_locals["func"]._schema.name)
    return ""
