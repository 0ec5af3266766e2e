"""What a model has of its own, besides its layers, that a pipeline of the layers lacks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from gpipebal.pipeline.process.caller import warn_caller

__all__ = [
    "hooks_of",
    "methods_of",
    "own_forward",
    "warn_of_lazy_norms",
    "warn_of_what_stays_behind",
]

_HOOKS = {
    "forward hooks": ("_forward_pre_hooks", "_forward_hooks"),
    "backward hooks": ("_backward_pre_hooks", "_backward_hooks"),
    "state-dict hooks": (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    ),
}

#: Methods that subclasses of `nn.Sequential` override to go another way through their layers.
_WAYS = ("forward", "__call__", "__iter__")

#: And those that they override to set, save or load their layers otherwise.
_METHODS = (
    "train",
    "eval",
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)


def own_forward(module: nn.Sequential) -> str | None:
    """Name what an `nn.Sequential` does instead of running its layers; None: it runs them."""
    for name in _WAYS:
        if getattr(type(module), name) is not getattr(nn.Sequential, name):
            return name
    return "forward" if "forward" in vars(module) else None


def methods_of(module: nn.Module) -> list[str]:
    """List the methods of its own by which an `nn.Sequential` sets, saves or loads its layers."""
    kind = type(module)
    return [name for name in _METHODS if getattr(kind, name) is not getattr(nn.Sequential, name)]


def hooks_of(module: nn.Module) -> list[str]:
    """List the kinds of hooks that a module itself has, not those of modules inside it."""
    return [kind for kind, names in _HOOKS.items() if any(map(module.__dict__.get, names))]


def warn_of_what_stays_behind(module: nn.Module) -> None:
    """Warn if a chain has something of its own: a pipeline takes nothing but its layers.

    Warns:
        UserWarning: it has hooks, parameters, buffers or methods.
    """
    found = hooks_of(module)
    if found:
        warn_caller(
            f"the model has {' and '.join(found)} of its own, which the pipeline does not take "
            "over: it runs the layers. Fix: register them on the pipeline (its forward hooks run "
            "for each call, with the whole mini-batch, and not in step), or on layers.",
        )
    own = [*module._parameters, *module._buffers]
    if own:
        warn_caller(
            f"the model has parameters or buffers of its own, which the pipeline does not take "
            f"over: {', '.join(map(repr, own))}. Fix: put them into a layer.",
        )
    methods = methods_of(module)
    if methods:
        kind = type(module).__name__
        warn_caller(
            f"the model has methods of its own, which the pipeline does not take over: "
            f"{', '.join(f'{kind}.{name}' for name in methods)}. Fix: put what they do into a "
            "layer, or do it to the layers after the pipeline's own: pipe.train(), and then "
            "pipe[1].eval(), say.",
        )


def warn_of_lazy_norms(layers: Iterable[nn.Module]) -> None:
    """Warn if a batch normalisation cannot be deferred because it has no channels yet.

    Warns:
        UserWarning: one is lazy.
    """
    modules = (module for layer in layers for module in layer.modules())
    if any(isinstance(x, _LazyNormBase) and isinstance(x, _BatchNorm) for x in modules):
        warn_caller(
            "a lazy batch normalisation is left as it is: its running statistics are updated once "
            "per micro-batch. Fix: run the model once, on a sample, before you make a pipeline "
            "of it.",
        )
