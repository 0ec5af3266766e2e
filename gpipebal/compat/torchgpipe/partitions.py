"""Partitions as torchgpipe shows them: containers of layers, with hooks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipebal.errors import ModelError, PipelineError

__all__ = ["PartitionLayers"]


class PartitionLayers(nn.Sequential):
    """The layers of one partition.

    The pipeline runs the layers, and not this container. Hooks on its forward are kept by its
    first and its last layer, and see what goes into and comes out of the partition.
    """

    def _deny_more_layers(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to add any, which torch numbers from 0: they would take the places of others."""
        raise PipelineError(
            "a layer cannot be added to a partition: the pipeline has as many as its balance "
            "counts.\n"
            "Fix: change the nn.Sequential, and make another pipeline of it; or replace a layer, "
            "pipe.partitions[j][k] = layer."
        )

    append = extend = insert = __iadd__ = __imul__ = _deny_more_layers

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Call ``hook(partition, inputs)`` before each micro-batch, and before its recompute."""
        return self[0].register_forward_pre_hook(
            lambda _, *given: hook(self, *given), prepend=prepend, with_kwargs=with_kwargs
        )

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Call ``hook(partition, inputs, output)`` after each micro-batch and its recompute.

        With `always_call` also if the last layer fails; not if another one does.
        """
        kept = threading.local()

        def keep(_: nn.Module, inputs: Any, keywords: Any) -> None:
            kept.given = (inputs, keywords) if with_kwargs else (inputs,)

        def call(_: nn.Module, __: Any, output: Any) -> Any:
            given = kept.__dict__.pop("given", ((), {}) if with_kwargs else ((),))
            return hook(self, *given, output)

        # With one handle the caller removes both hooks.
        first = self[0].register_forward_pre_hook(keep, with_kwargs=True)
        last = self[-1].register_forward_hook(call, prepend=prepend, always_call=always_call)
        return _Both(first, last)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a micro-batch's backward does not go through this container."""
        raise ModelError(
            "a partition cannot have backward hooks: the pipeline runs its layers one by one.\n"
            "Fix: register the hook on a layer, pipe.partitions[j][k]."
        )

    register_full_backward_pre_hook = register_full_backward_hook
    register_backward_hook = register_full_backward_hook

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: state dictionaries are made of the layers, not of this container."""
        raise ModelError(
            "a partition cannot have hooks on its state dictionary: the pipeline saves its layers "
            "one by one.\nFix: register the hook on the pipeline, or on a layer."
        )

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_pre_hook = register_state_dict_pre_hook
    register_load_state_dict_post_hook = register_state_dict_pre_hook


class _Both(RemovableHandle):
    """One handle for two hooks."""

    def __init__(self, first: RemovableHandle, last: RemovableHandle) -> None:
        super().__init__(OrderedDict())
        self._handles = (first, last)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
