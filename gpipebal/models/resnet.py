"""ResNet as a flat chain: every convolution, normalisation and ReLU is a layer of its own.

A chain can be cut between any two layers, also inside a residual block. Inside a block its input
has to travel along: from `Stash` to `AddSkip` the layers pass on a pair ``(x, skip)`` and work on
``x`` only. They subclass torch's own layers, so that parameters keep
the names of the flat layers (``layer1_0_conv1.weight``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from gpipebal.errors import UsageError

__all__ = ["AddSkip", "SkipBatchNorm2d", "SkipConv2d", "SkipReLU", "Stash", "resnet", "resnet101"]

#: A block's output has this many times the channels of its inner convolutions.
EXPANSION = 4

Pair = tuple[Tensor, Tensor]


class Stash(nn.Module):
    """Begin a residual block: return the input, and with it the same tensor as the skip."""

    def forward(self, x: Tensor) -> Pair:
        """Return ``(x, x)``."""
        return x, x


class SkipConv2d(nn.Conv2d):
    """A convolution of ``x`` that lets the skip pass by."""

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]  # a pair, see the module
        """Return ``(conv(x), skip)``."""
        x, skip = pair
        return super().forward(x), skip


class SkipBatchNorm2d(nn.BatchNorm2d):
    """A batch normalisation of ``x`` that lets the skip pass by."""

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]  # a pair, see the module
        """Return ``(norm(x), skip)``."""
        x, skip = pair
        return super().forward(x), skip


class SkipReLU(nn.ReLU):
    """A ReLU of ``x`` that lets the skip pass by."""

    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]  # a pair, see the module
        """Return ``(relu(x), skip)``."""
        x, skip = pair
        return super().forward(x), skip


class AddSkip(nn.Module):
    """End a residual block: add the skip, projected first where the block changes its shape.

    Args:
        projection: Applied to the skip; None: it is added as it is.
    """

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.downsample = projection

    def forward(self, pair: Pair) -> Tensor:
        """Return ``x + projection(skip)``."""
        x, skip = pair
        return x + (skip if self.downsample is None else self.downsample(skip))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Build ResNet-101 as a chain of 370 layers.

    Args:
        num_classes: Outputs of the last layer.

    Returns:
        A Sequential that takes images of shape ``(rows, 3, height, width)`` and gives logits of
        shape ``(rows, num_classes)``. 44,549,160 parameters at 1000 classes.

    Source:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. Differs:
        the stride of a block is in its 3x3 convolution.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = resnet101()
        >>> len(model), sum(p.numel() for p in model.parameters())
        (370, 44549160)
    """
    return resnet((3, 4, 23, 3), num_classes)


def resnet(
    blocks: Sequence[int] = (3, 4, 23, 3), num_classes: int = 1000, width: int = 64
) -> nn.Sequential:
    """Build a ResNet of bottleneck blocks as a flat chain.

    Convolutions start Kaiming normal (fan out, for ReLU), normalisations at weight 1 and bias
    0, the last layer as torch initialises it.

    Args:
        blocks: Number of blocks of each group; a group halves the image and doubles the
            channels, except the first.
        num_classes: Outputs of the last layer.
        width: Inner channels of the first group's blocks, and channels of the stem.

    Raises:
        UsageError: there are no blocks, or a number is not an integer of 1 or more.

    Example:
        >>> tiny = resnet((1, 1), num_classes=10, width=4)
        >>> len(tiny), [name for name, _ in tiny.named_children()][4:7]
        (29, ['layer1_0_identity', 'layer1_0_conv1', 'layer1_0_bn1'])
    """
    counts = dict(enumerate(blocks)) if isinstance(blocks, Sequence) else {}
    if not counts:
        raise UsageError(
            f"resnet cannot be built from this: blocks={blocks!r} (expected a number of blocks for "
            "each group).\nFix: blocks=(3, 4, 23, 3)."
        )
    numbers = {f"blocks[{k}]": count for k, count in counts.items()}
    for name, number in (numbers | {"num_classes": num_classes, "width": width}).items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(
                f"resnet cannot be built from this: {name}={number!r} (expected an integer >= 1)."
                f"\nFix: {name}=1, or more."
            )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    layers["bn1"] = nn.BatchNorm2d(width)
    layers["relu"] = nn.ReLU()
    layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = width
    for group, n_blocks in enumerate(blocks):
        inner = width * 2**group
        for index in range(n_blocks):
            stride = 2 if group > 0 and index == 0 else 1
            for part, layer in _block(channels, inner, stride).items():
                layers[f"layer{group + 1}_{index}_{part}"] = layer
            channels = inner * EXPANSION
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flat"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, num_classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _block(channels: int, inner: int, stride: int) -> dict[str, nn.Module]:
    """Return the eleven layers of one bottleneck block, by name."""
    outer = inner * EXPANSION
    projection = None
    if stride != 1 or channels != outer:
        projection = nn.Sequential(
            nn.Conv2d(channels, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
        )
    return {
        "identity": Stash(),
        "conv1": SkipConv2d(channels, inner, 1, bias=False),
        "bn1": SkipBatchNorm2d(inner),
        "relu1": SkipReLU(),
        "conv2": SkipConv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
        "bn2": SkipBatchNorm2d(inner),
        "relu2": SkipReLU(),
        "conv3": SkipConv2d(inner, outer, 1, bias=False),
        "bn3": SkipBatchNorm2d(outer),
        "residual": AddSkip(projection),
        "relu3": nn.ReLU(),
    }
