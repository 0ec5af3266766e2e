"""Nested Sequentials opened: more places where a chain can be cut."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gpipebal.pipeline.layers.chain import layers_of
from gpipebal.pipeline.layers.own import (
    hooks_of,
    methods_of,
    own_forward,
    warn_of_what_stays_behind,
)

__all__ = ["can_be_opened", "flatten"]


def flatten(module: nn.Module) -> nn.Sequential:
    """Open nested Sequentials, so that the chain can be cut between the layers inside them.

    A child that is an `nn.Sequential`, however deep, is replaced by its layers, in their order. One
    that does more than run them stays as it is: if it has a forward of its own (or an order, a
    ``train``, its own way to save them), hooks, parameters or buffers, or is compiled. So the
    result computes what `module` does.

    Args:
        module: An `nn.Sequential`; it is left as it is.

    Returns:
        A new `nn.Sequential` of the same layer objects. Each is named by its path, joined by
        ``_``; a name that is taken already gets another ``_`` at its end. Keys of the state dict
        change accordingly (``first.0.weight`` becomes ``first_0.weight``): load parameters before
        this call, and save those of `module`, which are the same tensors.

    Raises:
        ModelError: `module` is not an `nn.Sequential`, or does something other than run its
            layers one after the other.

    Warns:
        UserWarning: `module` has hooks, parameters, buffers or methods of its own, which are left
            out.

    Complexity:
        O(n) for n modules that are opened or kept.

    Example:
        >>> from collections import OrderedDict
        >>> block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> model = nn.Sequential(OrderedDict(body=nn.Sequential(block, nn.Tanh()), head=nn.Tanh()))
        >>> [name for name, _ in flatten(model).named_children()]
        ['body_0_0', 'body_0_1', 'body_1', 'head']
    """
    flat = nn.Sequential()
    for path, layer in _inside(module):
        name = "_".join(path)
        while hasattr(flat, name):
            name += "_"
        flat.add_module(name, layer)
    flat.training = module.training
    warn_of_what_stays_behind(module)
    return flat


def can_be_opened(module: nn.Module) -> bool:
    """Tell whether a module does nothing but run its layers one after the other."""
    return (
        isinstance(module, nn.Sequential)
        and own_forward(module) is None
        and not (module._parameters or module._buffers or hooks_of(module) or methods_of(module))
        and module._compiled_call_impl is None
    )


def _inside(module: nn.Module, path: tuple[str, ...] = ()) -> Iterator[tuple[list[str], nn.Module]]:
    for name, child in layers_of(module).items():
        if can_be_opened(child):
            yield from _inside(child, (*path, name))
        else:
            yield [*path, name], child
