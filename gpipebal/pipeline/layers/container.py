"""The module around the layers of a pipeline: their names, its settings, and what it refuses."""

from __future__ import annotations

import copy
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn, Self

import torch
from torch import nn

from gpipebal.argument_kinds import is_word, plain_number
from gpipebal.errors import BalanceError, ModelError, PipelineError
from gpipebal.pipeline.layers.old_keys import strip_partitions, with_stripped_versions
from gpipebal.pipeline.layers.proxy import Proxy
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.recorder import Recorder
from gpipebal.schedule import Checkpoint, check_checkpoint, check_count, check_schedule, modes_of

__all__ = ["Container"]

# Kept apart from the layers, which are registered under their own names: a layer may have one of
# these names too.
_CHANGEABLE = frozenset({"chunks", "checkpoint", "schedule", "timeout"})
_SETTINGS = _CHANGEABLE | {
    "balance",
    "devices",
    "threads_per_partition",
    "in_dims",
    "keyword_dims",
    "out_dims",
}

#: What a pipeline keeps for itself.
_OWN = frozenset({"_runtime", "_streams", "_recorder", "_ledger"})

#: How layers are added to and taken from an `nn.Sequential`.
_CHANGES = frozenset({"append", "extend", "insert", "pop"})

_KEEPS_LAYERS = (
    "a pipeline keeps as many layers as its balance has (expected pipe[k] = layer, which replaces "
    "one).\nFix: change the nn.Sequential, and make another pipeline of it."
)

_EXPECTED = {
    "chunks": "a whole number of 1 or more",
    "checkpoint": "'always', 'except_last', 'never', or a list with one of them per partition",
}


class Container(nn.Module):
    """Layers in partitions, under the names that they have in the plain model.

    So ``state_dict`` and ``named_parameters`` are the plain model's for every balance.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: Checkpoint
    schedule: str
    timeout: float | None
    threads_per_partition: int
    in_dims: Any
    keyword_dims: Any
    out_dims: Any

    def __init__(self) -> None:
        super().__init__()
        self._recorder: Recorder | None = None
        self._ledger: Ledger | None = None

    def layers_in_place(self) -> dict[str, nn.Module]:
        """Return the module that runs in each layer's place, by name: the layer, or its proxy."""
        return {name: layer for name, layer in self._modules.items() if layer is not None}

    @property
    def partitions(self) -> tuple[nn.Sequential, ...]:
        """The layers of each partition as an `nn.Sequential`: a view, made new each time."""
        views, layers = [], iter(self._modules.items())
        for size in self.balance:
            views.append(_View(OrderedDict(islice(layers, size))))  # type: ignore[arg-type]
        return tuple(views)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        layers = self.layers_in_place().values()
        return iter([x.stands_for if isinstance(x, Proxy) else x for x in layers])

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Replace a layer; the new one is on the device of its partition already."""
        # Not setattr: a setting may have this name too, and would be set.
        self.add_module(list(self._modules)[operator.index(index)], layer)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Replace the layer of this name; refuse to add one, which the balance does not count."""
        if name not in self._modules:
            raise PipelineError(
                f"a pipeline has no modules besides its layers: {name!s:.60}="
                f"{type(module).__name__} (expected the name of a layer).\n"
                "Fix: let another module hold it and the pipeline, or make it a layer."
            )
        if not isinstance(module, nn.Module):
            index = list(self._modules).index(name)
            raise ModelError(
                f"a layer of a pipeline is a module: pipe[{index}]={module!r:.60} (expected an "
                f"nn.Module).\nFix: pipe[{index}] = nn.Identity() for a layer that does nothing."
            )
        # Not nn.Module's own, which refuses the names of attributes of this class.
        self._modules[name] = module

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name in _SETTINGS:
            # Not through nn.Module: a layer may have this name, and would be overwritten.
            object.__setattr__(self, name, self._checked(name, value))
        elif isinstance(value, nn.Module) or name in self.__dict__.get("_modules", ()):
            self.add_module(name, value)
        else:
            super().__setattr__(name, value)

    def _checked(self, name: str, value: Any) -> Any:
        """Return a setting as it is kept, or refuse it; of what is its own a pipeline keeps all."""
        if name in self.__dict__ and name in _SETTINGS - _CHANGEABLE:
            raise PipelineError(
                f"{name} of a pipeline cannot be changed: {name}={value!r}.\n"
                f"Fix: make another pipeline of the same layers, GPipe(..., {name}=...)."
            )
        if name in ("chunks", "checkpoint") and is_word(value, "auto"):
            raise BalanceError(
                f"{name} of a pipeline is not chosen by itself: {name}='auto' (expected "
                f"{_EXPECTED[name]}).\n"
                f"Fix: plan = gpipebal.solve(profile, partitions, {name}='auto'), then "
                "GPipe.from_plan(model, plan)."
            )
        if name == "chunks":
            return check_count(name, value)
        if name == "checkpoint":
            check_checkpoint(value)
            value = value if isinstance(value, str) else list(value)
            if "balance" in self.__dict__:
                modes_of(value, len(self.balance))
        if name == "schedule":
            return check_schedule(value)
        return _check_timeout(value) if name == "timeout" else value

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            self._deny_other_layers()
        super().__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: {_KEEPS_LAYERS}"
            )
        return super().__getattr__(name)

    def _deny_other_layers(self, *args: Any) -> NoReturn:
        """Refuse to take layers away, or to add any."""
        raise PipelineError(_KEEPS_LAYERS)

    __delitem__ = __iadd__ = __imul__ = _deny_other_layers

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dictionary: the model's, or one of torchgpipe's with any balance."""
        state = with_stripped_versions(state_dict, self._modules)
        return super().load_state_dict(state, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Called before the layers load their entries, which they look for under their own names.
        strip_partitions(state_dict, prefix, self._modules, args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def start_recording(self, recorder: Recorder) -> None:
        """Let `trace` watch the coming mini-batches."""
        if self._recorder is not None:
            raise PipelineError(
                "this pipeline is traced already.\nFix: use the recorder of the outer trace."
            )
        self._recorder = recorder

    def stop_recording(self, recorder: Recorder) -> None:
        """End what `start_recording` began with this recorder, if it did."""
        if self._recorder is recorder:
            self._recorder = None

    def start_metering(self, ledger: Ledger) -> None:
        """Let `measure_memory` watch the coming mini-batches."""
        if self._ledger is not None:
            raise PipelineError(
                "this pipeline is metered already.\nFix: use the meter of the outer block."
            )
        self._ledger = ledger

    def stop_metering(self, ledger: Ledger) -> None:
        """End what `start_metering` began with this ledger, if it did."""
        if self._ledger is ledger:
            self._ledger = None

    def __getstate__(self) -> dict[str, Any]:
        # A trace or meter that watches this object does not watch a copy.
        return {**super().__getstate__(), "_recorder": None, "_ledger": None}

    def extra_repr(self) -> str:
        """Show the settings in addition to the layers."""
        return f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"

    def _deny_moving(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: each partition has its own device."""
        raise ModelError(
            "a pipeline cannot be moved, nor a module that it is part of: each partition lives on "
            "its own device.\n"
            "Fix: leave the call out (in a library that makes it: accelerate's "
            "device_placement=False, Fabric's move_to_device=False); give the devices when making "
            "it, GPipe(..., devices=[...]), and move the modules around it separately."
        )

    cuda = cpu = xpu = to_empty = _deny_moving

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype of the parameters; refuse to move them to another device."""
        # Not left to torch's own parser, which fails on a device that the machine does not have.
        places = [*args[:1], kwargs.get("device"), kwargs.get("tensor")]
        if any(isinstance(place, (torch.device, torch.Tensor, str, int)) for place in places):
            self._deny_moving()
        super().to(*args, **kwargs)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Refuse to be moved by a module that contains this one, which does not call `to` here."""

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            changed = fn(tensor)
            if changed.device != tensor.device:
                self._deny_moving()
            return changed

        super()._apply(apply, recurse)
        return self


class _View(nn.Sequential):
    """Layers of a partition, which the pipeline runs one by one and not as this module."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        nn.Module.__init__(self)
        self._modules.update(layers)

    def _get_name(self) -> str:
        return "Sequential"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter) or name in self._modules:
            self._deny_changes()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            self._deny_changes()
        super().__delattr__(name)

    def __getitem__(self, index: Any) -> Any:
        # Several layers, and a copy, are the caller's own.
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Sequential:
        return copy.deepcopy(self[:], memo)

    def _deny_changes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a change that the pipeline would not see."""
        raise PipelineError(
            "a partition cannot be changed: `pipe.partitions` only shows the layers, and is made "
            "again each time.\nFix: pipe[k] = layer replaces a layer; for more or fewer layers, "
            "make a new pipeline."
        )

    __setitem__ = __delitem__ = append = insert = extend = pop = _deny_changes
    add_module = register_module = register_parameter = register_buffer = _deny_changes

    def _deny_hooks(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a hook that would never run."""
        raise PipelineError(
            "a partition cannot have hooks: `pipe.partitions` only shows the layers, and is made "
            "again each time; the pipeline runs the layers one by one.\n"
            "Fix: register the hook on a layer, pipe.partitions[j][k], or on the pipeline itself."
        )

    register_forward_pre_hook = _deny_hooks
    register_forward_hook = _deny_hooks
    register_full_backward_pre_hook = _deny_hooks
    register_full_backward_hook = _deny_hooks
    register_backward_hook = _deny_hooks


def _check_timeout(timeout: object) -> float | None:
    if timeout is not None and not 0 < plain_number(timeout) <= threading.TIMEOUT_MAX:
        raise BalanceError(
            f"timeout is not a time: timeout={timeout!r:.60} (expected finite seconds above 0).\n"
            "Fix: timeout=None to wait for ever."
        )
    return None if timeout is None else plain_number(timeout)
