"""Writes to parameters at times when their values must stay as they are.

Autograd notices a write to what a graph has saved. A checkpointed forward saves nothing, and its
recompute would compute with the new values, without a word: so whoever recomputes asks here. Nor
does autograd notice an optimizer that steps in a hook, before all micro-batches have added their
gradients, if no graph has saved the parameter at that time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.values.tensors import are_equal

__all__ = ["ParameterWrites", "StepsInHooks"]

#: Differences of this many roundings are no change.
_ROUNDINGS = 16
#: Of numbers with few digits, as many roundings would hide a real change.
_MANY_DIGITS = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class ParameterWrites:
    """What a recompute has to know of writes to the parameters; made before its forward.

    A layer that writes in every forward may do so if writing again changes nothing, as with a
    limit (``weight.clamp_(min=0)``), or next to nothing, as when it makes them of length 1. Of
    parameters that a forward has written to, this keeps copies to tell.

    Args:
        modules: The modules whose parameters they are.
        alone: Whether nobody else looks if the recompute will find the modes and the parameters of
            the forward.
    """

    def __init__(self, modules: Modules, *, alone: bool = False) -> None:
        self._modules = modules
        self._alone = alone
        #: Modes of the modules after the forward; a backward inside of the forward is before that.
        self._training: list[bool] | None = None
        self._counts = modules.write_counts()
        self._copies: dict[tuple[nn.Module, str], Tensor] = {}

    def end_forward(self) -> None:
        """Look at the parameters after the forward."""
        before, self._counts = self._counts, self._modules.write_counts()
        if self._alone:
            self._training = [module.training for module in self._modules]
        for module, name, parameter in self._modules.written_to(before, self._counts):
            self._copies[module, name] = self._copy_of(parameter)

    def _copy_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy, the one of an earlier forward if that would do: micro-batches share it."""
        known = self._modules.copies.get(id(parameter))
        if known is None or not _are_close(known, parameter):
            known = self._modules.copies[id(parameter)] = parameter.detach().clone()
        return known

    def check(self, *, recomputed: bool = False) -> None:
        """Make sure that the parameters are as they were in the forward.

        Args:
            recomputed: Whether the recompute has run, which may have written as the forward did.

        Raises:
            ModelError: one has been written to since, and has other values; or, with `alone`, one
                was replaced, or a module switched to another mode.
        """
        if recomputed and not self._copies:
            return
        now = self._modules.write_counts()
        if self._alone and not recomputed:
            self._check_same(now.parameters)
        for module, name, parameter in self._modules.written_to(self._counts, now):
            copy = self._copies.get((module, name))
            if not (recomputed if copy is None else _are_close(copy, parameter)):
                raise ModelError(_message(module, name, parameter))

    def _check_same(self, parameters: Sequence[nn.Parameter]) -> None:
        places = zip(self._counts.parameters, parameters, strict=False)
        # FSDP exchanges those that have a part of the elements for plain ones, and back.
        replaced = any(
            one is not other and _is_plain(one) and _is_plain(other) for one, other in places
        )
        switched = self._training not in (None, [module.training for module in self._modules])
        if replaced or switched:
            raise ModelError(
                "a run of layers cannot be recomputed: since its forward a parameter was replaced, "
                "or a layer was switched between train and eval.\n"
                "Fix: call backward() before eval(), and inside the block of "
                "torch.func.functional_call; or leave these layers out of the runs."
            )


class StepsInHooks:
    """A look for optimizers that step in a hook while other micro-batches wait for their backward.

    Args:
        modules: The modules of a partition, and those of a loss.
    """

    def __init__(self, *modules: Modules) -> None:
        # An embedding limits its rows again where a backward recomputes a run of layers.
        self._parameters = [
            one
            for each in modules
            for one in each.counted()
            if getattr(one, "_post_accumulate_grad_hooks", None) or one._backward_hooks
            if one.requires_grad and not one.is_inference()
        ]
        self._counts: list[int] = []

    def begin(self) -> None:
        """Look before the backward of a micro-batch."""
        self._counts = [one._version for one in self._parameters]

    def check(self) -> None:
        """Make sure that its hooks have written to no parameter.

        Raises:
            PipelineError: one has.
        """
        if self._counts != [one._version for one in self._parameters]:
            raise PipelineError(
                "a hook on a parameter has written to it before its gradient is complete: more "
                "micro-batches follow.\n"
                "Fix: let the optimizer step after the whole backward, not in a hook; or chunks=1."
            )


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter)


def _are_close(copy: Tensor, parameter: Tensor) -> bool:
    """Tell whether two tensors have the same elements, but for rounding.

    To normalise what has been normalised changes its last digits.
    """
    if copy.dtype != parameter.dtype or copy.device != parameter.device:
        return False
    if are_equal(copy, parameter):
        return True
    if copy.shape != parameter.shape or not copy.layout == parameter.layout == torch.strided:
        return False
    if copy.dtype not in _MANY_DIGITS:
        return False
    least = _ROUNDINGS * torch.finfo(copy.dtype).eps * copy.abs().amax()
    return bool(((copy - parameter.detach()).abs() <= least).all())


def _message(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    what = (
        "a checkpointed micro-batch cannot be recomputed: "
        f"a parameter{'' if parameter.requires_grad else ' that is not trained'} was written to "
        f"after its forward, by a layer or a hook: {name!r} of a {type(module).__name__}.\n"
    )
    if parameter.requires_grad:
        return (
            f"{what}Fix: let optimizers step after the whole backward, not in a hook, and let "
            "layers write to their parameters between mini-batches."
        )
    return (
        f"{what}Fix: write to it between mini-batches; or make it a buffer, which a recompute sees "
        "as its forward did; or checkpoint='never'."
    )
