"""AmoebaNet-D as a chain: a stem, cells, and a classifier.

A cell reads the outputs of the two cells before it, so a pair goes from layer to layer:
the newest output, and the one before. Inside a cell seven *states* are computed, each of the last
five as a sum of two operations on earlier ones; the tables `NORMAL` and `REDUCTION` say which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models.catalogue import check_arguments

__all__ = ["AmoebaCell", "amoebanetd"]

Pair = tuple[Tensor, Tensor]

#: What a cell adds up: pairs of ``(operation, state it reads)``, two for each of states 2 to 6.
Recipe = tuple[tuple[tuple[str, int], tuple[str, int]], ...]

NORMAL: Recipe = (
    (("conv_1x1", 1), ("avg_pool_3x3", 1)),
    (("identity", 1), ("conv_7x1_1x7", 0)),
    (("conv_1x1", 0), ("conv_7x1_1x7", 0)),
    (("avg_pool_3x3", 2), ("identity", 2)),
    (("avg_pool_3x3", 1), ("conv_1x1", 5)),
)
REDUCTION: Recipe = (
    (("max_pool_2x2", 0), ("avg_pool_3x3", 0)),
    (("identity", 2), ("conv_3x3", 1)),
    (("conv_7x1_1x7", 2), ("avg_pool_3x3", 2)),
    (("identity", 3), ("max_pool_2x2", 1)),
    (("avg_pool_3x3", 2), ("conv_1x1", 3)),
)

#: The states whose channels a cell puts side by side as its output.
NORMAL_OUTPUT = (0, 3, 4, 6)
REDUCTION_OUTPUT = (4, 5, 6)


def amoebanetd(
    L: int = 18,  # noqa: N803 - the letters of the publications
    D: int = 208,  # noqa: N803
    num_classes: int = 1000,
) -> nn.Sequential:
    """Build AmoebaNet-D (L, D) as a chain of ``L + 6`` layers.

    Args:
        L: Number of normal cells, a multiple of 3.
        D: Channels inside the first third's cells, a multiple of 4; twice and four times as many
            inside the others'.
        num_classes: Outputs of the last layer.

    Returns:
        A Sequential that takes images of shape ``(rows, 3, height, width)``, at 33 pixels or more
        also a single row, and gives logits of shape ``(rows, num_classes)``.

    Raises:
        UsageError: a number is out of range (a ValueError).

    Source:
        Real et al., "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019,
        figure 5; Huang et al., "GPipe", NeurIPS 2019, table 1, for (L, D); Kim et al.,
        "torchgpipe", 2020, section 4.2. The outputs of a cell follow the published
        parameter counts. Differs: where the paper's cells have a 3x3 max pool, these take the mean,
        as does the model that torchgpipe's published figures are of; pools take images of any size
        (the last one pools over all that is left, the 2x2 one rounds up), which is the same at the
        published 224 pixels.

    Example:
        >>> with torch.device("meta"):
        ...     model = amoebanetd(18, 208)
        >>> len(model), sum(p.numel() for p in model.parameters())
        (24, 81505540)
        >>> [name for name, _ in model.named_children()][:5]
        ['stem1', 'stem2', 'stem3', 'cell1_normal1', 'cell1_normal2']
    """
    check_arguments("amoebanetd", {"L": L, "D": D, "num_classes": num_classes})
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = D // 4
    layers["stem1"] = Stem(width)
    before, newest, reduced = width, width, False

    def add(name: str, is_reduction: bool) -> None:
        nonlocal before, newest, reduced, width
        if is_reduction:
            width *= 2
        cell = AmoebaCell(before, newest, width, is_reduction, reduced)
        layers[name] = cell
        before, newest, reduced = newest, cell.out_channels, is_reduction

    add("stem2", True)
    add("stem3", True)
    for group in (1, 3, 5):
        if group > 1:
            add(f"cell{group - 1}_reduction", True)
        for index in range(L // 3):
            add(f"cell{group}_normal{index + 1}", False)
    layers["classify"] = Classifier(newest, num_classes)
    return nn.Sequential(layers)


class AmoebaCell(nn.Module):
    """Compute the seven states of a cell, and put some of them side by side.

    Args:
        before: Channels of the older input.
        newest: Channels of the newer input.
        width: Channels of every state.
        is_reduction: Whether the cell halves height and width.
        after_reduction: Whether the cell before did, so that the older input is twice as high
            and wide as the newer.
    """

    def __init__(
        self, before: int, newest: int, width: int, is_reduction: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        self.recipe = REDUCTION if is_reduction else NORMAL
        self.outputs = REDUCTION_OUTPUT if is_reduction else NORMAL_OUTPUT
        self.out_channels = width * len(self.outputs)
        self.prepare0 = _convolutions((newest, width, 1, 1, 0))
        self.prepare1: nn.Module = nn.Identity()
        if after_reduction:
            self.prepare1 = Halve(before, width)
        elif before != width:
            self.prepare1 = _convolutions((before, width, 1, 1, 0))
        self.operations = nn.ModuleList(
            # The first two states have the size of the input, all others that of the output.
            OPERATIONS[name](width, 2 if is_reduction and state < 2 else 1)
            for terms in self.recipe
            for name, state in terms
        )

    def forward(self, x: Tensor | Pair) -> Pair:
        """Return the cell's output, and its newer input for the next cell."""
        newest, before = x if isinstance(x, tuple) else (x, x)
        states = [self.prepare0(newest), self.prepare1(before)]
        operations = iter(self.operations)
        for (_, first), (_, second) in self.recipe:
            states.append(next(operations)(states[first]) + next(operations)(states[second]))
        return torch.cat([states[index] for index in self.outputs], dim=1), newest


class Stem(nn.Sequential):
    """Turn an image into `width` channels of half its height and width."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )


class Classifier(nn.Module):
    """Average the newest output over the image, and weigh its channels for each class."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, pair: Pair) -> Tensor:
        """Return logits of shape ``(rows, num_classes)``."""
        logits: Tensor = self.linear(self.pool(pair[0]).flatten(1))
        return logits


class Halve(nn.Module):
    """Halve height and width without losing a pixel's parity.

    Half of the output's channels are made from the pixels of even row and column, half from those
    of odd ones.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, width // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, width // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `width` channels of half the height and width."""
        x = self.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        normalised: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return normalised


Shape = int | tuple[int, int]


def _convolutions(*shapes: tuple[int, int, Shape, Shape, Shape]) -> nn.Sequential:
    """Chain ReLU, convolution and normalisation for each (in, out, kernel, stride, padding)."""
    layers: list[nn.Module] = []
    for channels, outputs, kernel, stride, padding in shapes:
        layers += [
            nn.ReLU(),
            nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
        ]
    return nn.Sequential(*layers)


def _conv_7x1_1x7(width: int, stride: int) -> nn.Module:
    inner = width // 4
    return _convolutions(
        (width, inner, 1, 1, 0),
        (inner, inner, (1, 7), (1, stride), (0, 3)),
        (inner, inner, (7, 1), (stride, 1), (3, 0)),
        (inner, width, 1, 1, 0),
    )


def _conv_3x3(width: int, stride: int) -> nn.Module:
    inner = width // 4
    return _convolutions(
        (width, inner, 1, 1, 0), (inner, inner, 3, stride, 1), (inner, width, 1, 1, 0)
    )


def _avg_pool_3x3(width: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _max_pool_2x2(width: int, stride: int) -> nn.Module:
    # Rounded up as the convolutions round, or odd heights and widths would not match.
    return nn.MaxPool2d(2, stride, ceil_mode=True)


#: Makes an operation from the width of the states and the stride.
OPERATIONS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "identity": lambda width, stride: nn.Identity(),
    "avg_pool_3x3": _avg_pool_3x3,
    "max_pool_2x2": _max_pool_2x2,
    "conv_1x1": lambda width, stride: _convolutions((width, width, 1, stride, 0)),
    "conv_3x3": _conv_3x3,
    "conv_7x1_1x7": _conv_7x1_1x7,
}
