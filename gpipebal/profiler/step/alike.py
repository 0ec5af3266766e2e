"""Optimizers like the caller's, of stand-ins, whose steps change nothing of the caller's."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from gpipebal.copies import deep_copy

__all__ = ["copied", "global_hooks_left_out", "optimizer_like", "without_memory"]

#: Attributes of an optimizer that must not be copied to another one: its parameters, a step that a
#: scheduler has put in place of its own, and hooks.
_ITS_OWN = frozenset({"defaults", "param_groups", "state", "step"})


def optimizer_like(
    theirs: Optimizer,
    groups: Sequence[tuple[Mapping[str, Any], Sequence[nn.Parameter]]],
    memo: dict[int, Any],
) -> Optimizer:
    """Make an optimizer like another one, with a copy of all that it has but its state.

    Args:
        theirs: The other optimizer.
        groups: Options of each group, and the stand-ins in it.
        memo: Stand-ins for all parameters, by identity; what is copied is added.
    """
    # As if it were read from a file: the constructor's arguments are not always the options.
    made = type(theirs).__new__(type(theirs))
    memo[id(theirs)] = made
    given = {
        "defaults": copied(dict(theirs.defaults), memo),
        "state": defaultdict(dict),
        "param_groups": [{**copied(options, memo), "params": ours} for options, ours in groups],
    }
    for name, value in given.items():
        memo[id(getattr(theirs, name))] = value
    attributes = {
        name: copied(value, memo)
        for name, value in vars(theirs).items()
        if name not in _ITS_OWN and not name.endswith("_hooks")
    }
    made.__setstate__({**attributes, **given})
    # The constructor sets it, and a file does not have it. Without it, torch's step on a machine
    # with CUDA asks for an option that not every optimizer has.
    made._warned_capturable_if_run_uncaptured = True
    return made


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value; what cannot be copied, such as a lock, is shared."""
    try:
        return deep_copy(value, memo)
    except Exception:
        return value


def without_memory(parameter: nn.Parameter, device: str = "meta") -> nn.Parameter:
    """Make a parameter of the same shape, whose elements are all the same place in memory."""
    one = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)


@contextmanager
def global_hooks_left_out() -> Iterator[None]:
    """Leave out, in this thread, the hooks that a user has registered for steps of all optimizers.

    A hook that averages a model would otherwise do so at every step of stand-ins.

    Example:
        >>> steps = []
        >>> handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: steps.append(1))
        >>> stepper = torch.optim.SGD([torch.ones(1)])
        >>> with global_hooks_left_out():
        ...     stepper.step()
        >>> stepper.step()
        >>> handle.remove()
        >>> len(steps)
        1
    """
    thread, found = threading.get_ident(), list(_global_hooks())
    left_out = [(hooks, key, hook, _in_others(hook, thread)) for hooks, key, hook in found]
    try:
        for hooks, key, hook, instead in left_out:
            if hooks.get(key) is hook:
                hooks[key] = instead
        yield
    finally:
        for hooks, key, hook, instead in left_out:
            if hooks.get(key) is instead:  # the user may have removed it
                hooks[key] = hook


def _global_hooks() -> Iterator[tuple[dict[int, Any], int, Callable[..., Any]]]:
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        hooks = getattr(torch_optimizer, name, {})
        for key, hook in list(hooks.items()):
            yield hooks, key, hook


def _in_others(hook: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """Return what calls a hook in all threads but one."""

    def called(*args: Any) -> Any:
        return None if threading.get_ident() == thread else hook(*args)

    return called
