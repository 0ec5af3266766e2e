"""Optimizers of stand-ins: made like the caller's optimizer, for some of the parameters."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gpipebal.errors import ProfileError
from gpipebal.pipeline.meter import optimizer_states
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.memory.sparse_gradients import GradientKind
from gpipebal.profiler.step.alike import copied, optimizer_like, without_memory

__all__ = ["Maker", "OptimizerFactory", "OptimizerLike", "Optimizers", "as_one"]

#: Makes an optimizer from a list of parameters, or several that share them out.
OptimizerFactory: TypeAlias = Callable[[Sequence[nn.Parameter]], Optimizer | Sequence[Optimizer]]
#: What `profile_model` takes: such a callable, or what it makes of the model's parameters.
OptimizerLike: TypeAlias = OptimizerFactory | Optimizer | Sequence[Optimizer]
#: Options that a ``foreach`` step takes as tensors only for CUDA graphs, with arbitrary numbers.
_PLAIN: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999)}


class Optimizers(tuple[Optimizer, ...]):
    """Several optimizers that step one after the other, each its own parameters.

    Example:
        >>> import torch
        >>> one, other = torch.ones(1), torch.ones(1)
        >>> both = Optimizers([torch.optim.SGD([one]), torch.optim.Adam([other])])
        >>> len(both.param_groups)
        2
    """

    __slots__ = ()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in their order."""
        return [group for one in self for group in one.param_groups]

    def step(self) -> None:
        """Let each take its step."""
        for one in self:
            one.step()

    def zero_grad(self) -> None:
        """Clear the gradients of all their parameters."""
        for one in self:
            one.zero_grad()


def as_one(made: Optimizer | Sequence[Optimizer]) -> Optimizer | Optimizers:
    """Return an optimizer as it is, and several as one that steps them all."""
    # A wrapper that steps an optimizer need not be one itself.
    several = made if isinstance(made, (list, tuple)) else [cast(Optimizer, made)]
    return several[0] if len(several) == 1 else Optimizers(several)


class Maker:
    """Makes optimizers like the caller's, of stand-ins for some of the model's parameters.

    Args:
        optimizer: An optimizer, or several that share the parameters out, whose groups and their
            options are taken over, and whose state is left alone; or a callable that makes them of
            a list of parameters.
        parameters: The model's parameters, each once.

    Attributes:
        parameters: The model's parameters.
        stepped: For each, whether an optimizer steps it: some may be left out.
        sparse: By place, what the gradient of a mini-batch looks like where it is sparse.
        name: Name of the optimizer's class, or of the classes.
        needs_closure: Whether a step of one calls the model itself, so that it cannot be run alone.

    Raises:
        ProfileError: the optimizer is not an optimizer, has other parameters, or cannot be made;
            or two optimizers step one parameter.
    """

    def __init__(self, optimizer: OptimizerLike, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._make = None if _optimizers_of(optimizer) else cast(OptimizerFactory, optimizer)
        made: Any = optimizer
        known: Sequence[Any] = self.parameters
        if self._make is not None:
            if not callable(optimizer):
                raise _no_optimizer(f"type(optimizer)={type(optimizer).__name__}")
            known, made = _made_of(self._make, self.parameters)
        self._known = known
        self._wholes = _optimizers_of(made)
        # By place, and by group: the number of an optimizer, and that of one of its groups.
        self._group_of: dict[int, tuple[int, int]] = {}
        self._options: dict[tuple[int, int], dict[str, Any]] = {}
        places = {id(p): place for place, p in enumerate(known)}
        for number, whole in enumerate(self._wholes):
            for place, group in self._take_groups(number, whole, places):
                if self._group_of.setdefault(place, group)[0] != number:
                    raise _no_optimizer(
                        f"two of them step parameter {place} of the model",
                        "give each parameter to one of them.",
                    )
        trainable = [parameter.requires_grad for parameter in self.parameters]
        if self._wholes and any(trainable) and not any(trainable[k] for k in self._group_of):
            raise _no_optimizer("it is an optimizer of other parameters than the model's")
        self.stepped = [
            needs and (not self._wholes or place in self._group_of)
            for place, needs in enumerate(trainable)
        ]
        self.sparse: dict[int, GradientKind] = {}
        self._names = [type(whole).__name__ for whole in self._wholes] or [
            getattr(optimizer, "__name__", "optimizer")
        ]
        self.name = " and ".join(self._names)
        self._need_closures = [*map(_needs_closure, self._wholes)]
        self.needs_closure = any(self._need_closures)

    def _take_groups(
        self, number: int, whole: Optimizer, places: Mapping[int, int]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Keep the options of an optimizer's groups; yield the place and the group of its own."""
        for g, group in enumerate(whole.param_groups):
            self._options[number, g] = {k: v for k, v in group.items() if k != "params"}
            for parameter in group["params"]:
                if id(parameter) in places:
                    yield places[id(parameter)], (number, g)

    def note_gradients(self, kinds: Mapping[int, GradientKind]) -> None:
        """Take note of the gradients that are sparse, by identity of the parameter."""
        of_all = ((place, kinds.get(id(one))) for place, one in enumerate(self.parameters))
        self.sparse = {place: kind for place, kind in of_all if kind is not None}

    def group_of(self, place: int) -> tuple[int, int]:
        """Return the number of the optimizer that steps a parameter, and of its group there.

        Where nothing is known of groups, there is one.
        """
        return self._group_of.get(place, (0, 0))

    def name_of(self, place: int) -> str:
        """Return the name of the class of the optimizer that steps a parameter."""
        return self._names[self.group_of(place)[0]]

    def needs_closure_at(self, place: int) -> bool:
        """Tell whether the optimizer that steps a parameter calls the model itself."""
        return self.needs_closure and self._need_closures[self.group_of(place)[0]]

    def make(
        self, places: Sequence[int], stand_ins: Sequence[nn.Parameter]
    ) -> Optimizer | Optimizers:
        """Make an optimizer of stand-ins for the parameters in these places."""
        members: dict[tuple[int, int], list[nn.Parameter]] = {}
        shares: dict[int, tuple[list[int], list[nn.Parameter]]] = {}
        for place, stand_in in zip(places, stand_ins, strict=True):
            group = self.group_of(place)
            members.setdefault(group, []).append(stand_in)
            its_places, its_stand_ins = shares.setdefault(group[0], ([], []))
            its_places.append(place)
            its_stand_ins.append(stand_in)
        if self._make is not None and len(self._wholes) < 2:
            try:
                made: Any = self._make(list(stand_ins))
            except Exception:
                if not self._wholes:
                    raise
                # It needs others too, as one that joins two optimizers for different parameters.
            else:
                if self._wholes:
                    made = as_one(made)
                    # From some parameters it may make other groups than from all.
                    made.param_groups = [
                        {**copied(options, {}), "params": ours}
                        for options, ours in self._groups(0, members)
                    ]
                return cast(Optimizer, made)
        alike = [self._like(number, *share, members) for number, share in sorted(shares.items())]
        return alike[0] if len(alike) == 1 else Optimizers(alike)

    def _like(
        self,
        number: int,
        places: Sequence[int],
        stand_ins: Sequence[nn.Parameter],
        groups: Mapping[tuple[int, int], list[nn.Parameter]],
    ) -> Optimizer:
        """Make an optimizer like one of the caller's, with these groups of stand-ins.

        Stand-ins for parameters that it does not step have no values.
        """
        memo: dict[int, Any] = {id(one): without_memory(one) for one in self._known}
        for place, stand_in in zip(places, stand_ins, strict=True):
            memo[id(self._known[place])] = stand_in
        return optimizer_like(self._wholes[number], self._groups(number, groups), memo)

    def _groups(
        self, number: int, members: Mapping[tuple[int, int], list[nn.Parameter]]
    ) -> list[tuple[dict[str, Any], list[nn.Parameter]]]:
        return [
            (self._options[group], stand_ins)
            for group, stand_ins in sorted(members.items())
            if group[0] == number
        ]

    def make_plain(
        self, places: Sequence[int], stand_ins: Sequence[nn.Parameter], device_type: str
    ) -> tuple[Optimizer | Optimizers, bool]:
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
        for one in made if isinstance(made, Optimizers) else [made]:
            for group in one.param_groups:
                if device_type == "cuda" and "foreach" in group:
                    group["foreach"] = not is_fused and _is_foreach_on_cuda(one, group)
        for group in made.param_groups:
            if group.get("capturable") and group.get("foreach"):
                # Options that are tensors are then refused.
                group.update(
                    {name: _PLAIN[name] for name in _PLAIN if _holds_tensor(group.get(name))}
                )
            for name in ("fused", "capturable"):
                if group.get(name):
                    group[name] = False
        return made, is_fused

    def idle_bytes(self, place: int) -> int:
        """Return the bytes of state that an optimizer has for a parameter that it does not step.

        Some make state for all parameters that they are given, and what was stepped before it was
        frozen still has its own.
        """
        parameter = self._known[place]
        states = [state for whole in self._wholes for state in optimizer_states(whole)]
        of_it = [state.get(parameter) for state in states]
        # By identity: a wrapper may have the same tensors.
        values = {
            id(value): bytes_of(value)
            for state in of_it
            if isinstance(state, Mapping)
            for value in state.values()
            if isinstance(value, Tensor)
        }
        return sum(values.values())

    def way_of(self, place: int) -> Any:
        """Return a key that parameters share whose steps take equally long for a byte.

        Optimizers may differ in that, and groups of one by options that choose an algorithm: names,
        switches, and whether a number is 0. What is not an option of the optimizer, such as a name
        of the group, chooses nothing. Sparse gradients are another way too.
        """
        number, _ = group = self.group_of(place)
        options = self._options.get(group, {})
        known = getattr(self._wholes[number], "defaults", {}) if self._wholes else {}
        chosen = []
        for name in sorted(known.keys() & options.keys()):
            option = options[name]
            is_number = isinstance(option, int | float)
            if is_number or isinstance(option, str | None):
                chosen.append((name, bool(option) if is_number else option))
        return number, tuple(chosen), place in self.sparse

    def kind_of(self, place: int) -> tuple[Any, ...]:
        """Return a key that two parameters share only if they are stepped alike."""
        parameter = self.parameters[place]
        group, sparse = self.group_of(place), self.sparse.get(place)
        return (tuple(parameter.shape), parameter.stride(), parameter.dtype, group, sparse)


def _optimizers_of(made: Any) -> list[Optimizer]:
    """Return an optimizer, or several in a list; an empty one for anything else."""
    several = made if isinstance(made, (list, tuple)) else [cast(Optimizer, made)]
    return list(several) if all(isinstance(one, Optimizer) for one in several) else []


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


def _made_of(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter]
) -> tuple[list[nn.Parameter], Any]:
    """Make an optimizer of stand-ins for parameters; some optimizers need values.

    Returns:
        The stand-ins, and what was made.

    Raises:
        ProfileError: it cannot be made, or is not an optimizer.
    """
    stand_ins = [without_memory(parameter) for parameter in parameters]
    if not stand_ins:
        return [], None
    try:
        made: Any = optimizer(list(stand_ins))
    except Exception:
        stand_ins = [without_memory(parameter, "cpu") for parameter in parameters]
        try:
            made = optimizer(list(stand_ins))
        except Exception as error:
            raise ProfileError(
                f"the optimizer cannot be made: {said(error)} (expected a "
                "callable that makes one of a list of the model's parameters).\n"
                "Fix: make it of list(model.parameters()) first; what works there is what to give."
            ) from error
    if not _optimizers_of(made) and not hasattr(made, "step"):
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


def _no_optimizer(
    what: str, fix: str = "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), say."
) -> ProfileError:
    return ProfileError(
        f"optimizer cannot be profiled: {what} (expected an optimizer of the model's parameters, "
        "a list of several, or a callable that makes them of a list of parameters).\n"
        f"Fix: {fix}"
    )
