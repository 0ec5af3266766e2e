"""Every built-in model at a size that a test can train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipebal.models import MODELS, resnet


class Small(NamedTuple):
    """A small model in float64 with a mini-batch."""

    model: nn.Sequential
    sample: Any
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


#: Arguments, and pixels of the images, that are small and leave nothing of a model out.
SIZES: dict[str, tuple[dict[str, int], int | None]] = {
    "resnet101": ({"num_classes": 5}, 33),
    "amoebanetd": ({"L": 3, "D": 16, "num_classes": 5}, 33),
    "unet": ({"B": 2, "C": 4, "depth": 2}, 13),
    "gpt": ({"layers": 2, "width": 16, "heads": 2, "vocabulary": 31, "context": 6}, None),
}


def small(name: str, rows: int = 6) -> Small:
    """Build a small model of this name, with `rows` rows of data."""
    arguments, size = SIZES[name]
    entry = MODELS[name].configure(**arguments)
    # The blocks of ResNet-101 are no argument, and too many for a test.
    model = resnet((1, 2), 5, 4) if name == "resnet101" else entry.build()
    sample, target = entry.make_sample(rows, size, 0), entry.make_target(rows, size, 0)
    if sample.is_floating_point():
        sample = sample.double()
    if target.is_floating_point():
        target = target.double()
    return Small(model.double(), sample, target, entry.loss_fn)
