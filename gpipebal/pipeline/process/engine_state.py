"""What torch's autograd engine, and this thread, are doing right now.

An autograd Function cannot see whether the running backward keeps the graph, or whether it asks for
parameter gradients at all; nor can anything see which backward and which node run, what number the
next node will have, which hooks a caller's block has set, or whether a trace or a transform of
`torch.func` is at work. torch knows, and its private functions tell. They are called here and
nowhere else; tests check each against what it must answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "current_backward",
    "current_node",
    "is_fake",
    "is_recorded",
    "is_transformed",
    "keeps_graph",
    "next_node",
    "nodes_behind",
    "top_saved_tensors_hooks",
    "will_run",
]

_get_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)

#: What torch says outside of a backward.
_NO_BACKWARD = -1


def current_backward() -> int | None:
    """Return the number of the backward that runs in this thread; None: none does."""
    found: int = torch._C._current_graph_task_id()
    return None if found == _NO_BACKWARD else found


def current_node() -> Any:
    """Return the node of the graph that runs in this thread; None: none does."""
    return torch._C._current_autograd_node()


def keeps_graph() -> bool:
    """Tell, inside a backward, whether it was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Tell, inside a backward, whether it will run an autograd node.

    ``backward()`` runs every node; ``torch.autograd.grad`` only those on the way to its inputs.
    """
    return bool(torch._C._will_engine_execute_node(node))


def nodes_behind(roots: Iterable[Any], stop: Collection[Any] = ()) -> Iterator[Any]:
    """Yield each node of a graph once.

    Args:
        roots: Nodes to start from; None: none.
        stop: Nodes at which the search stops.
    """
    seen, left = {None, *stop}, list(roots)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def next_node() -> int | None:
    """Return the number that the next node of this thread will have; None: torch does not tell."""
    return None if _get_sequence_nr is None else _get_sequence_nr()


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the hooks of the innermost `saved_tensors_hooks` that is open; None: none is."""
    known = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if known is None else known(True)


def is_transformed() -> bool:
    """Tell whether this thread is inside of a transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded() -> bool:
    """Tell whether operations of this thread are recorded, as by `make_fx`."""
    key = torch._C._TorchDispatchModeKey.PROXY
    before_autograd = torch._ops._get_dispatch_mode_pre_dispatch(key)
    return torch._C._get_dispatch_mode(key) is not None or before_autograd is not None


def is_fake() -> bool:
    """Tell whether operations of this thread only pretend to run, in a `FakeTensorMode`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
