"""A module in a layer's place: it runs the layer in another way, and is like it in all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

__all__ = ["Proxy"]

#: What a proxy has in common with its layer: what changes in one changes in the other.
_SHARED = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _of_layer(name: str) -> Callable[..., Any]:
    """Make a method that calls the layer's own."""

    def method(self: Proxy, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.stands_for, name)(*arguments, **keywords)

    method.__name__ = name
    method.__doc__ = f"Call `{name}` of the layer."
    return method


class Proxy(nn.Module):
    """A layer's place in a chain.

    Parameters, buffers, attributes, hooks and modes are the layer's, read and written; a walk
    through the modules of a model, with `modules` or `apply`, meets the layer.

    Args:
        layer: The layer.

    Example:
        >>> proxy = Proxy(nn.Dropout(0.1))
        >>> proxy.p = 0.5
        >>> proxy.stands_for, [type(module).__name__ for module in proxy.modules()]
        (Dropout(p=0.5, inplace=False), ['Dropout'])
    """

    _layer: nn.Module

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Not registered: it would appear in names.
        self.__dict__.update(_layer=layer, _version=layer._version)
        for name in _SHARED:
            self.__dict__[name] = layer.__dict__[name]

    @property
    def training(self) -> bool:
        """The mode of the layer."""
        return self._layer.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_layer" in self.__dict__:
            self._layer.training = mode

    @property
    def stands_for(self) -> nn.Module:
        """The layer in whose place it is."""
        return self._layer

    def __getattr__(self, name: str) -> Any:
        # Special names are not forwarded: copies and pickles of this object are its own.
        if "_layer" in self.__dict__ and not name.startswith("__"):
            return getattr(self._layer, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_layer" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in self.__dict__ and name not in _SHARED:
            self.__dict__[name] = value
        else:
            setattr(self._layer, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._layer, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the layer and the modules in it."""
        return self._layer.named_modules(memo, prefix, remove_duplicate)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to the layer and the modules in it."""
        self._layer.apply(fn)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layer."""
        self._layer.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._layer._apply(fn, recurse)
        return self

    state_dict = _of_layer("state_dict")
    _save_to_state_dict = _of_layer("_save_to_state_dict")
    _load_from_state_dict = _of_layer("_load_from_state_dict")
    compile = _of_layer("compile")
    register_forward_pre_hook = _of_layer("register_forward_pre_hook")
    register_forward_hook = _of_layer("register_forward_hook")
    register_full_backward_pre_hook = _of_layer("register_full_backward_pre_hook")
    register_full_backward_hook = _of_layer("register_full_backward_hook")
    register_backward_hook = _of_layer("register_backward_hook")
