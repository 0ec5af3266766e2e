"""How many examples hypothesis draws for the properties of the solvers.

The usual number keeps the suite fast. For a long run, so many for each property::

    GPIPEBAL_EXAMPLES=10000 python -m pytest tests/solvers tests/planner --timeout=0
"""

from __future__ import annotations

import os

__all__ = ["examples"]


def examples(usual: int) -> int:
    """Return the usual number of examples, or what the environment asks for, if that is more."""
    return max(usual, int(os.environ.get("GPIPEBAL_EXAMPLES", "0")))
