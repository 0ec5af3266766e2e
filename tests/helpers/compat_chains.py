"""Small chains for the tests of torchgpipe's interface."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


def chain() -> nn.Sequential:
    """Make a chain of named layers, one of which has buffers."""
    layers = [("first", nn.Linear(3, 4)), ("norm", nn.BatchNorm1d(4)), ("last", nn.Linear(4, 2))]
    return nn.Sequential(OrderedDict(layers)).double()


def inputs(rows: int = 6, width: int = 3) -> Tensor:
    """Make a mini-batch in double precision."""
    return torch.randn(rows, width, dtype=torch.double)
