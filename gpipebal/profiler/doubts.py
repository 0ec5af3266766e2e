"""Doubts: what to flag about layers, besides their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from gpipebal.pipeline.layers.flat import can_be_opened, flatten
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.replicas.compiled import runs_as_written
from gpipebal.profiler.replicas.foreign import had_hooks, has_foreign, moves_foreign
from gpipebal.profiler.replicas.harmless import reached_past, uses_compiled, weights_reached
from gpipebal.profiler.survey import Survey

__all__ = [
    "doubts_about",
    "doubts_about_loss",
    "doubts_about_movers",
    "doubts_about_parameters",
    "doubts_about_peaks",
]

#: Memory of a loss is flagged if it is more than this part of the model's own.
_NEGLIGIBLE = 0.01
#: More names than this are counted, not named.
_MOST_NAMES = 3


def doubts_about(
    names: Sequence[str], layers: Sequence[nn.Module], *, keep_modes: bool
) -> Iterator[str]:
    """Yield flags about these layers: what is not as a user may expect.

    Args:
        names: Their names.
        layers: The caller's layers.
        keep_modes: Whether they are measured in the mode that they are in.
    """
    told: list[tuple[str, Callable[[nn.Module], bool]]] = [
        (
            "memory and operations are those of the code as written, not of the compiled",
            uses_compiled,
        ),
        ("measured uncompiled: what compiled it cannot be found out", runs_as_written),
        ("hooks ran while it was measured, as they do in training", _has_hooks),
        (
            "hooks on parameters do not run in a profile; their time and memory are not counted",
            _has_hooks_on_parameters,
        ),
        (
            "nn.Sequential, one layer: gpipebal.flatten(model) lets cuts stand inside",
            _is_nested,
        ),
    ]
    if keep_modes:
        told.append(("in evaluation mode, and measured so", _evaluates))
    for what, is_so in told:
        found = [name for name, layer in zip(names, layers, strict=True) if is_so(layer)]
        if found:
            yield f"{_listed(found)}: {what}"


def doubts_about_parameters(names: Sequence[str], layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a flag if layers, which have run, use parameters that they do not register.

    Args:
        names: Their names.
        layers: The caller's layers.
    """
    found = [
        name
        for name, layer in zip(names, layers, strict=True)
        if has_foreign(name, layer) or reached_past(layer)
    ]
    if found:
        yield (
            f"{_listed(found)}: uses parameters that it does not register; their memory is not "
            "counted"
        )


def doubts_about_movers(names: Sequence[str]) -> list[str]:
    """Return a flag if layers, or the loss, use a tensor that no two threads may use at once.

    Args:
        names: Names of the layers.
    """
    found = [name for name in names if moves_foreign(name)]
    if not found and not moves_foreign("loss"):  # the name of its chain
        return []
    who = _listed(found) if found else "the loss"
    return [
        f"{who}: a tensor that all copies share gets new memory; measured in one thread, "
        "so what neighbours do to each other is not measured"
    ]


def doubts_about_peaks(names: Sequence[str], known: Survey) -> Iterator[str]:
    """Yield a flag if there was no memory to run layers with the gradients that a chain gives them.

    Args:
        names: Their names.
        known: What is known of them.
    """
    each = zip(names, known.memory, known.gradients.layers, strict=True)
    found = [name for name, memory, given in each if memory.peaks.is_doubtful(given.memory)]
    if found:
        yield (
            f"{_listed(found)}: no memory was left for gradients that are parts of larger ones; "
            "plans leave out copies that the layer may make of them"
        )


def doubts_about_loss(loss_fn: Any, layers: Sequence[nn.Module]) -> Iterator[str]:
    """Yield a flag if a loss has parameters of its own, and is no module that could tell which.

    Class weights and the like, of less memory than a plan is wrong by anyway, are left out.

    Args:
        loss_fn: The loss; None: it is not known.
        layers: The caller's layers.
    """
    if loss_fn is None or isinstance(loss_fn, nn.Module):
        return
    known = {id(tensor): tensor for layer in layers for tensor in weights_reached(layer)}
    own = [tensor for tensor in weights_reached(loss_fn) if id(tensor) not in known]
    if sum(map(bytes_of, own)) > _NEGLIGIBLE * sum(map(bytes_of, known.values())):
        yield (
            "the loss can use parameters of no layer, whose memory is not counted; give it as a "
            "module that has them"
        )


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMES:
        return f"{len(names)} layers, the first is {names[0]!r}"
    return ("layer " if len(names) == 1 else "layers ") + ", ".join(map(repr, names))


def _has_hooks(layer: nn.Module) -> bool:
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for part in layer.modules()
    )


def _has_hooks_on_parameters(layer: nn.Module) -> bool:
    return any(map(had_hooks, layer.parameters()))


def _is_nested(layer: nn.Module) -> bool:
    return can_be_opened(layer) and len(flatten(layer)) > 1


def _evaluates(layer: nn.Module) -> bool:
    return not all(part.training for part in layer.modules())
