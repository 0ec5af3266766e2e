"""What torch's autograd engine is doing right now: the only use of its private functions.

An autograd Function cannot see which backward is running, whether that keeps the graph, or whether
it asks for parameter gradients at all. The engine knows, and has private functions that tell. They
are called here and nowhere else; tests check them against what they must answer.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["keeps_graph", "running_backward", "will_run"]


def keeps_graph() -> bool:
    """Tell, inside a backward, whether it was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def running_backward() -> int:
    """Return a number of the running backward, the same in all its threads and in no other."""
    return int(torch._C._current_graph_task_id())


def will_run(node: Any) -> bool:
    """Tell, inside a backward, whether it will run an autograd node.

    ``backward()`` runs every node; ``torch.autograd.grad`` only those on the way to its inputs.
    """
    return bool(torch._C._will_engine_execute_node(node))
