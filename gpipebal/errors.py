"""The exceptions that gpipebal raises.

Every one is a `GpipebalError`, and also the builtin that a user of torch would expect, so that
both ``except GpipebalError`` and ``except ValueError`` read naturally. The text of an error has
three parts: what broke which rule (with the value), the smallest evidence, and a line ``Fix:``
with an action that works.
"""

from __future__ import annotations

__all__ = [
    "BalanceError",
    "DeviceError",
    "DuplicateLayerError",
    "FileFormatError",
    "GpipebalError",
    "InfeasibleError",
    "KindError",
    "MissingFileError",
    "ModelError",
    "PipelineError",
    "PipelineTimeoutError",
    "ProfileError",
    "RowsError",
    "UnsupportedPlanError",
    "UsageError",
    "VerificationError",
]


class GpipebalError(Exception):
    """Base of every error that gpipebal raises on purpose.

    Example:
        >>> from gpipebal import balance_cost
        >>> try:
        ...     balance_cost([1, 2], partitions=3)
        ... except GpipebalError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        BalanceError True
    """


class BalanceError(GpipebalError, ValueError):
    """A balance, a number of partitions, chunks or a checkpoint mode that cannot be used."""


class InfeasibleError(BalanceError):
    """A request that no split can meet; the text names the tightest partition and what would fit.

    Attributes:
        partition: The partition that lacks memory, in the split that lacks least; None where
            rules about cuts, not memory, leave no split.
        shortage: Bytes that it lacks.
    """

    def __init__(self, text: str, partition: int | None = None, shortage: int | None = None):
        super().__init__(text)
        self.partition = partition
        self.shortage = shortage


class ProfileError(GpipebalError, ValueError):
    """A profile that cannot be taken, or that does not fit what it is used with."""


class KindError(GpipebalError, TypeError):
    """An argument of the wrong kind, such as a model where a profile belongs."""


class ModelError(GpipebalError, TypeError):
    """A module, an input or an output of a kind that a pipeline cannot work with."""


class RowsError(ModelError, ValueError):
    """Tensors of one mini-batch, or its keyword arguments, that have different rows.

    It is a TypeError, like other inputs that cannot be divided, and also a ValueError, as for
    shapes that do not fit.
    """


class DuplicateLayerError(GpipebalError, ValueError):
    """Something that partitions cannot share, such as a parameter on different devices."""


class DeviceError(GpipebalError, ValueError, IndexError):
    """A device that does not exist, or fewer devices than partitions.

    torchgpipe raises IndexError for too few devices, its users catch ValueError: it is both.
    """


class FileFormatError(GpipebalError, ValueError):
    """A saved file that is unreadable, damaged, of another kind, or of another version."""


class MissingFileError(FileFormatError, FileNotFoundError):
    """A file to be read that does not exist."""


class UnsupportedPlanError(GpipebalError, ValueError):
    """A plan or a schedule that cannot be run, or about which something asked for is not known."""


class PipelineError(GpipebalError, RuntimeError):
    """A pipeline that was used in a way that its state does not allow."""


class PipelineTimeoutError(PipelineError, TimeoutError):
    """No worker finished an action within the timeout; the text says what each is doing."""


class UsageError(GpipebalError, ValueError):
    """A word, on a command line or as an argument, that names nothing existing or possible."""


class VerificationError(GpipebalError, AssertionError):
    """A pipeline that differs from the plain model; the text names the first difference."""
