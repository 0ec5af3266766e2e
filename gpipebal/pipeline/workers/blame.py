"""Which layer's backward failed: found out afterwards, so that a step that succeeds pays nothing.

Autograd numbers the nodes of a graph as they are made, and runs them backwards, highest first. A
node frees what it saved once it has run. So the node that failed lies between the lowest one that
has freed something and the highest one that still has all of it; and the numbers that were read
between the layers of the forward, one for each layer, tell which layer it belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor

from gpipebal.pipeline.process import engine_state

__all__ = ["note_failed_layers", "note_gaps", "note_no_graph", "note_second_backward"]

#: Nodes that accumulate a gradient have this number, and no place in the order.
_LAST = 2**64 - 1


def note_no_graph(error: RuntimeError) -> None:
    """Note in an error that the forward, which is recomputed later, records no graph."""
    with suppress(Exception):  # the error's own class may refuse to be read, or to take a note
        if "require grad" in str(error) or "requires_grad" in str(error):
            error.add_note(
                "(This forward records no graph, because it is recomputed later. Fix: let a layer "
                "that differentiates by its own input do so by x.detach().requires_grad_(), under "
                "torch.enable_grad(); and one that hooks or keeps a gradient of its own do so if "
                "torch.is_grad_enabled(); or checkpoint='never'.)"
            )


def note_gaps(error: RuntimeError, leaves: Sequence[Any]) -> None:
    """Note in an error of `Tensor.view` that a part of a mini-batch may have gaps in memory."""
    with suppress(Exception):
        has_gaps = any(isinstance(one, Tensor) and not one.is_contiguous() for one in leaves)
        if has_gaps and "view size is not compatible" in str(error):
            error.add_note(
                "(A micro-batch is a part of the mini-batch: if its rows lie along another "
                "dimension than 0, as in_dims says, it has gaps in memory. Fix: let the layer call "
                "reshape() instead of view().)"
            )


def note_second_backward(error: BaseException) -> None:
    """Note in an error of autograd that each cell goes back through a graph by itself."""
    with suppress(Exception):
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "(Each micro-batch of each partition has a backward of its own, and two of them "
                "lead into one graph: that of values given to functional_call, or of a tensor that "
                "a layer has kept from an earlier micro-batch. Fix: give value.detach()."
                "requires_grad_() and pass its gradient on, keep a detach(); or call "
                "backward(retain_graph=True).)"
            )


def note_failed_layers(
    error: BaseException,
    roots: Sequence[Any],
    marks: Sequence[int | None],
    describe: Callable[[int], str],
) -> None:
    """Note in an error in which layers' backward it came up, as far as that can be told.

    Args:
        error: What a backward that has not kept its graph raised.
        roots: The nodes that it started from.
        marks: What `engine_state.next_node` returned before each layer.
        describe: Names a layer, given by its index.
    """
    # Whatever happens here, the error itself is what the caller needs.
    with suppress(Exception):
        found = _failed_layers(roots, marks, error)
        if found is not None:
            first, last = map(describe, found)
            between = f" or before it, down to {first}" if first != last else ""
            error.add_note(f"in the backward of {last}{between}")


def _failed_layers(
    roots: Iterable[Any], marks: Sequence[int | None], error: BaseException
) -> tuple[int, int] | None:
    """Return the indices of the first and the last layer in question; None: nothing is known."""
    nodes = {node: node._sequence_nr() for node in engine_state.nodes_behind(roots)}
    numbers = sorted({number for number in nodes.values() if number != _LAST})
    begins = [mark for mark in marks if mark is not None]
    if not numbers or not begins:
        return None
    states = {number: state for node, number in nodes.items() if (state := _has_freed(node))}
    freed = min((n for n, state in states.items() if state == "freed"), default=_LAST)
    whole = max((n for n, state in states.items() if state == "whole"), default=-1)
    numbers = [number for number in numbers if whole <= number < freed]
    # A view of a parameter saves nothing either, but its backward cannot fail.
    views = {nodes[node] for node in nodes if nodes[node] not in states and _is_of_parameter(node)}
    numbers = [number for number in numbers if number not in views] or numbers
    # A node that saved nothing does not show whether it has run; Python code shows that it did.
    ran = {nodes[node] for node in nodes if _was_running(node, error.__traceback__)}
    numbers = [number for number in numbers if number in ran] or numbers
    # Gradients are accumulated right after the node that found them, with the parameter's hooks.
    if not ran and any(nodes[node] == freed and _leads_to_hooks(node) for node in nodes):
        numbers.append(freed)
    if not numbers:
        return None
    first, last = (max(0, bisect_right(begins, at) - 1) for at in (numbers[0], numbers[-1]))
    return first, last


def _has_freed(node: Any) -> str:
    """Tell whether a node has ``'freed'`` what it saved, is ``'whole'``, or ``''``: saved nothing.

    Reading a saved tensor would run hooks that may compute or load it. So it is asked to take
    other hooks, which it refuses once it is freed; the graph will not be used again.
    """
    found = ""
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            for one in saved if isinstance(saved, tuple | list) else (saved,):
                one.register_hooks(_same, _same)
                found = "whole"
        except RuntimeError as refusal:
            text = str(refusal)
            if "freed" in text or "second time" in text:
                return "freed"
            if "None" not in text:
                found = "whole"
    return found


def _is_of_parameter(node: Any) -> bool:
    """Tell whether all that a node's backward outputs is added to gradients of parameters."""
    return all(
        before is None or before._sequence_nr() == _LAST for before, _ in node.next_functions
    )


def _leads_to_hooks(node: Any) -> bool:
    """Tell whether a gradient that a node finds goes to a parameter with hooks of its own."""
    for before in (before for before, _ in node.next_functions if before is not None):
        leaf = getattr(before, "variable", None)
        if leaf is None:
            # A view of a parameter lies between.
            if before.next_functions and _is_of_parameter(before) and _leads_to_hooks(before):
                return True
        elif leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return True
    return False


def _same(value: Any) -> Any:
    return value


def _was_running(node: Any, traceback: TracebackType | None) -> bool:
    """Tell whether an error passed through the backward that a node's class has in Python."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    code = getattr(backward, "__code__", None)
    while code is not None and traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False
