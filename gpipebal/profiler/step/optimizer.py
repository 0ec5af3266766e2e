"""Optimizers of stand-ins: made like the caller's optimizer, for some of the parameters."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import said

__all__ = ["Maker", "OptimizerFactory", "OptimizerLike"]

#: Makes an optimizer from a list of parameters.
OptimizerFactory: TypeAlias = Callable[[Sequence[nn.Parameter]], Optimizer]
#: What `profile_model` takes: such a callable, or an optimizer of the model's parameters.
OptimizerLike: TypeAlias = OptimizerFactory | Optimizer
#: Attributes of an optimizer that must not be copied to another one: its parameters, a step that a
#: scheduler has put in place of its own, and hooks.
_ITS_OWN = frozenset({"defaults", "param_groups", "state", "step"})
#: Options that a ``foreach`` step takes as tensors only for CUDA graphs, with arbitrary numbers.
_PLAIN: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999)}


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
        needs_closure: Whether a step calls the model itself, so that it cannot be run alone.

    Raises:
        ProfileError: the optimizer is not an optimizer, has other parameters, or cannot be made.
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
            known, made = _made_of(optimizer, self.parameters)
        self._whole: Any = made
        self._known = known
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
        if not isinstance(self._optimizer, Optimizer):
            try:
                made = self._optimizer(list(stand_ins))
            except Exception:
                if not isinstance(self._whole, Optimizer):
                    raise
                # It needs others too, as one that joins two optimizers for different parameters.
            else:
                if self._options:
                    # From some parameters it may make other groups than from all.
                    made.param_groups = self._groups(groups)
                return made
        # As if it were read from a file: the constructor's arguments are not always the options.
        theirs: Optimizer = self._whole
        made = type(theirs).__new__(type(theirs))
        given = {
            "defaults": dict(theirs.defaults),
            "state": defaultdict(dict),
            "param_groups": self._groups(groups),
        }
        made.__setstate__({**self._attributes(made, given, places, stand_ins), **given})
        # The constructor sets it, and a file does not have it. Without it, torch's step on a
        # machine with CUDA asks for an option that not every optimizer has.
        made._warned_capturable_if_run_uncaptured = True
        return made

    def _attributes(
        self,
        made: Optimizer,
        given: Mapping[str, Any],
        places: Sequence[int],
        stand_ins: Sequence[nn.Parameter],
    ) -> dict[str, Any]:
        """Copy the attributes of an optimizer of all parameters that its own class has set.

        Args:
            made: The optimizer that gets them.
            given: What it has in place of those of that optimizer.
            places: Places of the parameters that it steps.
            stand_ins: Stand-ins for these parameters; those for the rest have no values.
        """
        theirs: Any = self._whole
        memo: dict[int, Any] = {id(theirs): made}
        for name, value in given.items():
            memo[id(getattr(theirs, name))] = value
        for parameter in self._known:
            memo[id(parameter)] = _without_memory(parameter)
        for place, stand_in in zip(places, stand_ins, strict=True):
            memo[id(self._known[place])] = stand_in
        copied: dict[str, Any] = {}
        for name, value in vars(theirs).items():
            if name in _ITS_OWN or name.endswith("_hooks"):
                continue
            try:
                copied[name] = copy.deepcopy(value, memo)
            except Exception:
                copied[name] = value  # what cannot be copied, such as a lock, is shared
        return copied

    def _groups(self, members: Mapping[int, list[nn.Parameter]]) -> list[dict[str, Any]]:
        return [
            {**self._options[number], "params": stand_ins}
            for number, stand_ins in sorted(members.items())
        ]

    def make_plain(
        self, places: Sequence[int], stand_ins: Sequence[nn.Parameter], device_type: str = "cpu"
    ) -> tuple[Optimizer, bool]:
        """Make an optimizer that can step anywhere; return whether the caller's step is fused.

        A fused step cannot run without values, and one for CUDA graphs cannot run on a CPU. With
        both options off, an optimizer keeps the same state. On CUDA many optimizers choose to be
        ``foreach``: this one is told to be.

        Args:
            places: Places of the parameters.
            stand_ins: Stand-ins for them.
            device_type: Type of the device that it is to step on.
        """
        made = self.make(places, stand_ins)
        is_fused = any(group.get("fused") for group in made.param_groups)
        for group in made.param_groups:
            if device_type == "cuda" and "foreach" in group:
                group["foreach"] = not is_fused and _is_foreach_on_cuda(made, group)
            if group.get("capturable") and group.get("foreach"):
                # Options that are tensors are then refused.
                group.update(
                    {name: _PLAIN[name] for name in _PLAIN if _holds_tensor(group.get(name))}
                )
            for name in ("fused", "capturable"):
                if group.get(name):
                    group[name] = False
        return made, is_fused

    def group_of(self, place: int) -> Any:
        """Return a key for the group of a parameter, whose options it is stepped with."""
        return self._group_of.get(place)

    def kind_of(self, place: int) -> tuple[Any, ...]:
        """Return a key that two parameters share only if they are stepped alike."""
        parameter = self.parameters[place]
        group = self.group_of(place)
        return (tuple(parameter.shape), parameter.stride(), parameter.dtype, group)


def _is_foreach_on_cuda(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer steps all parameters of a group at once on CUDA.

    This is ``foreach``. Where the group leaves it open, most of torch's optimizers choose it there;
    Adafactor does not, nor does any whose step is differentiated or whose options are tensors.

    Args:
        optimizer: The optimizer.
        group: One of its groups, as the caller has made it.
    """
    if group.get("foreach", False) is not None or group.get("fused"):
        return bool(group.get("foreach"))
    if group.get("differentiable"):
        return False
    if not group.get("capturable") and any(_holds_tensor(group.get(name)) for name in _PLAIN):
        return False
    home = getattr(type(optimizer).step, "__module__", "")
    if home.startswith("torch.optim."):
        return hasattr(sys.modules.get(home), "_default_to_fused_or_foreach")
    return True  # not one of torch's; its option of this name is taken to mean the same


def _holds_tensor(option: Any) -> bool:
    options = option if isinstance(option, (tuple, list)) else (option,)
    return any(isinstance(each, Tensor) for each in options)


def _without_memory(parameter: nn.Parameter, device: str = "meta") -> nn.Parameter:
    """Make a parameter of the same shape, whose elements are all the same place in memory."""
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)


def _made_of(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], Any]:
    """Make an optimizer of stand-ins for parameters; some optimizers need values.

    Returns:
        The stand-ins, and what was made.

    Raises:
        ProfileError: it cannot be made, or is not an optimizer.
    """
    stand_ins = [_without_memory(parameter) for parameter in parameters]
    if not stand_ins:
        return [], None
    try:
        made: Any = optimizer(list(stand_ins))
    except Exception:
        stand_ins = [_without_memory(parameter, "cpu") for parameter in parameters]
        try:
            made = optimizer(list(stand_ins))
        except Exception as error:
            raise ProfileError(
                f"the optimizer cannot be made: {said(error)} (expected a "
                "callable that makes one of a list of the model's parameters).\n"
                "Fix: make it of list(model.parameters()) first; what works there is what to give."
            ) from error
    if not isinstance(made, Optimizer) and not hasattr(made, "step"):
        raise _no_optimizer(f"it makes a {type(made).__name__}")
    return stand_ins, made


def _needs_closure(made: Optimizer) -> bool:
    """Tell whether a step must be given a function that calls the model.

    The class's own step decides: a scheduler puts another one, which tells nothing, into an
    instance.
    """
    try:
        _, *parameters = inspect.signature(type(made).step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _no_optimizer(what: str) -> ProfileError:
    return ProfileError(
        f"optimizer cannot be profiled: {what} (expected an optimizer of the model's parameters, "
        "or a callable that makes one of a list of parameters).\n"
        "Fix: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), say."
    )
