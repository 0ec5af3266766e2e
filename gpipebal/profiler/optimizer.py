"""Optimizers of stand-ins: made as the caller's optimizer is made, of some of the parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from gpipebal.errors import ProfileError

__all__ = ["Maker", "OptimizerFactory", "OptimizerLike"]

#: Makes an optimizer of a list of parameters.
OptimizerFactory: TypeAlias = Callable[[Sequence[nn.Parameter]], Optimizer]
#: What `profile_model` takes: such a callable, or an optimizer of the model's parameters.
OptimizerLike: TypeAlias = OptimizerFactory | Optimizer


class Maker:
    """Makes optimizers like the caller's, of stand-ins for some of the model's parameters.

    Args:
        optimizer: A callable that makes an optimizer of a list of parameters; or an optimizer,
            whose groups and their options are taken over, and whose state is left alone.
        parameters: The model's parameters, each once.

    Attributes:
        parameters: The model's parameters.
        stepped: For each, whether the optimizer steps it: it may leave some out.
        name: Name of the optimizer's class.
        needs_closure: Whether a step calls the model itself, so that it cannot be had alone.

    Raises:
        ProfileError: the optimizer is no optimizer, or one of other parameters.
    """

    def __init__(self, optimizer: OptimizerLike, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._optimizer = optimizer
        self._group_of: dict[int, int] = {}
        self._options: list[dict[str, Any]] = []
        trainable = [parameter.requires_grad for parameter in self.parameters]
        made: Any = optimizer
        known: Sequence[Any] = self.parameters
        if not isinstance(optimizer, Optimizer):
            if not callable(optimizer):
                raise _no_optimizer(f"type(optimizer)={type(optimizer).__name__}")
            known = [_without_values(parameter) for parameter in self.parameters]
            made = None if not known else _made_of(optimizer, known)
        is_known = isinstance(made, Optimizer)
        if is_known:
            places = {id(p): place for place, p in enumerate(known)}
            for number, group in enumerate(made.param_groups):
                self._options.append({k: v for k, v in group.items() if k != "params"})
                for parameter in group["params"]:
                    if id(parameter) in places:
                        self._group_of[places[id(parameter)]] = number
            if any(trainable) and not any(trainable[place] for place in self._group_of):
                raise _no_optimizer("it is an optimizer of other parameters than the model's")
        self.stepped = [
            needs and (not is_known or place in self._group_of)
            for place, needs in enumerate(trainable)
        ]
        self.name = type(made).__name__ if is_known else getattr(optimizer, "__name__", "optimizer")
        self.needs_closure = is_known and _needs_closure(made)

    def make(self, places: Sequence[int], stand_ins: Sequence[nn.Parameter]) -> Optimizer:
        """Make an optimizer of stand-ins for the parameters in these places."""
        groups: dict[int, list[nn.Parameter]] = {}
        for place, stand_in in zip(places, stand_ins, strict=True):
            groups.setdefault(self._group_of.get(place, 0), []).append(stand_in)
        theirs = self._optimizer
        if not isinstance(theirs, Optimizer):
            made = theirs(list(stand_ins))
            if self._options:
                # Of some parameters it may make other groups than of all.
                made.param_groups = self._groups(groups)
            return made
        # As it is read from a file: the constructor's arguments are not always the options.
        made = type(theirs).__new__(type(theirs))
        made.__setstate__(
            {
                "defaults": dict(theirs.defaults),
                "state": defaultdict(dict),
                "param_groups": self._groups(groups),
            }
        )
        # The constructor sets it, and a file has it not. Without it torch's step asks, where there
        # is CUDA, for an option that not every optimizer has.
        made._warned_capturable_if_run_uncaptured = True
        return made

    def _groups(self, members: Mapping[int, list[nn.Parameter]]) -> list[dict[str, Any]]:
        return [
            {**self._options[number], "params": stand_ins}
            for number, stand_ins in sorted(members.items())
        ]

    def make_plain(
        self, places: Sequence[int], stand_ins: Sequence[nn.Parameter]
    ) -> tuple[Optimizer, bool]:
        """Make an optimizer that can step anywhere; return whether the caller's step is fused.

        A fused step cannot run without values, and one for CUDA graphs not on a CPU. Told not to,
        an optimizer keeps the same state.
        """
        made = self.make(places, stand_ins)
        is_fused = any(group.get("fused") for group in made.param_groups)
        for group in made.param_groups:
            for name in ("fused", "capturable"):
                if group.get(name):
                    group[name] = False
        return made, is_fused

    def group_of(self, place: int) -> Any:
        """Return what names the group of a parameter, whose options it is stepped with."""
        return self._group_of.get(place)

    def kind_of(self, place: int) -> tuple[Any, ...]:
        """Return what two parameters have in common only if they are stepped alike."""
        parameter = self.parameters[place]
        group = self.group_of(place)
        return (tuple(parameter.shape), parameter.stride(), parameter.dtype, group)


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    one = torch.empty((), dtype=parameter.dtype, device="meta")
    return nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)


def _made_of(optimizer: OptimizerFactory, stand_ins: Sequence[nn.Parameter]) -> Any:
    """Make an optimizer of parameters without values; None: it cannot be made of those."""
    try:
        made = optimizer(list(stand_ins))
    except Exception:
        return None  # with values it may, or it says then why not
    if not isinstance(made, Optimizer) and not hasattr(made, "step"):
        raise _no_optimizer(f"it makes a {type(made).__name__}")
    return made


def _needs_closure(made: Optimizer) -> bool:
    try:
        parameters = inspect.signature(made.step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _no_optimizer(what: str) -> ProfileError:
    return ProfileError(
        f"optimizer cannot be profiled: {what} (expected an optimizer of the model's parameters, "
        "or a callable that makes one of a list of parameters).\n"
        "Fix: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), say."
    )
