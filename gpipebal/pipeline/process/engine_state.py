"""What torch's autograd engine is doing right now: the only use of its private functions.

An autograd Function cannot see whether the running backward keeps the graph, or whether it asks
for parameter gradients at all. The engine knows, and two private functions tell. They
are called here and nowhere else; a test checks both against what they must answer.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["keeps_graph", "will_run"]


def keeps_graph() -> bool:
    """Tell, inside a backward, whether it was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Tell, inside a backward, whether it will run an autograd node.

    ``backward()`` runs every node; ``torch.autograd.grad`` only those on the way to its inputs.
    """
    return bool(torch._C._will_engine_execute_node(node))
