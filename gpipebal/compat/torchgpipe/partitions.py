"""Partitions as torchgpipe shows them: containers of layers, with hooks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipebal.errors import ModelError

__all__ = ["PartitionLayers"]


class PartitionLayers(nn.Sequential):
    """The layers of one partition.

    The pipeline runs the layers, and not this container. Hooks on its forward are kept by its
    first and its last layer, and see what goes into and comes out of the partition.
    """

    def register_forward_pre_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], *, prepend: bool = False
    ) -> RemovableHandle:
        """Call ``hook(partition, inputs)`` before each micro-batch, and before its recompute."""
        return self[0].register_forward_pre_hook(
            lambda _, inputs: hook(self, inputs), prepend=prepend
        )

    def register_forward_hook(  # type: ignore[override]
        self, hook: Callable[..., Any], *, prepend: bool = False
    ) -> RemovableHandle:
        """Call ``hook(partition, inputs, output)`` after each micro-batch and its recompute."""
        kept = threading.local()

        def keep(_: nn.Module, inputs: Any) -> None:
            kept.inputs = inputs

        def call(_: nn.Module, __: Any, output: Any) -> Any:
            inputs = kept.__dict__.pop("inputs", ())
            return hook(self, inputs, output)

        # Of one handle the caller removes both hooks.
        first = self[0].register_forward_pre_hook(keep)
        last = self[-1].register_forward_hook(call, prepend=prepend)
        return _Both(first, last)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a micro-batch's backward does not pass this container."""
        raise ModelError(
            "a partition cannot have backward hooks: the pipeline runs its layers one by one.\n"
            "Fix: register the hook on a layer, pipe.partitions[j][k]."
        )

    register_full_backward_pre_hook = register_full_backward_hook


class _Both(RemovableHandle):
    """One handle for two hooks."""

    def __init__(self, first: RemovableHandle, last: RemovableHandle) -> None:
        super().__init__(OrderedDict())
        self._handles = (first, last)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
