"""What a split of a chain costs, exactly: layers, devices, links, memory and rules.

`chunking` tells what a profile says for another number of micro-batches.
"""

from gpipebal.problem.bounds import to_balance, to_bounds
from gpipebal.problem.device import Device
from gpipebal.problem.link import Link, Links, links_of
from gpipebal.problem.memory import Memory, layer_memory
from gpipebal.problem.problem import Problem
from gpipebal.problem.rules import RULE_NAMES, Rules

__all__ = [
    "RULE_NAMES",
    "Device",
    "Link",
    "Links",
    "Memory",
    "Problem",
    "Rules",
    "layer_memory",
    "links_of",
    "to_balance",
    "to_bounds",
]
