"""U-Net as a flat chain: down to coarse images, and up again with the features from the way down.

The output of a level on the way down goes past all layers in between, straight to the layer on the
way up that joins it (`gpipebal.skip`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models.catalogue import check_arguments
from gpipebal.skip import Namespace, pop, skippable, stash

__all__ = ["JoinSkip", "StashSkip", "unet"]


@skippable(stash=["skip"])
class StashSkip(nn.Module):
    """Keep the input for `JoinSkip` of the same level, and return it too."""

    def forward(self, x: Tensor) -> Any:
        """Return `x`."""
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class JoinSkip(nn.Module):
    """Append the channels of the level's skip to those of the input.

    An input that is smaller, since halving rounds down, is padded with zeros at its
    bottom and right.
    """

    def forward(self, x: Tensor) -> Any:
        """Return the input's and the skip's channels."""
        skip = yield pop("skip")
        bottom, right = (skip.shape[dim] - x.shape[dim] for dim in (2, 3))
        return torch.cat([F.pad(x, (0, right, 0, bottom)), skip], dim=1)


def unet(
    B: int = 5,  # noqa: N803 - the letters of the publication
    C: int = 64,  # noqa: N803
    depth: int = 5,
    in_channels: int = 3,
    out_channels: int = 1,
) -> nn.Sequential:
    """Build U-Net (B, C) as a flat chain.

    Every convolution, dropout, normalisation and activation is a layer of its own, as is every
    end of a skip: ``4 B (2 depth + 1) + 4 depth + 1`` layers.

    Args:
        B: Convolutions at each level on the way down, at the bottom, and on the way up.
        C: Channels of the first level, a multiple of 2; each further one has twice as many.
        depth: Levels, each of half the height and width of the one before.
        in_channels: Channels of the image.
        out_channels: Channels of the output.

    Returns:
        A Sequential that takes images of shape ``(rows, in_channels, height, width)``, of
        ``2 ** (depth + 1)`` pixels or more, and gives logits of shape
        ``(rows, out_channels, height, width)``.

    Raises:
        UsageError: a number is out of range (a ValueError).

    Source:
        Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation",
        MICCAI 2015, for the idea; Kim et al., "torchgpipe", 2020, section 4.2, for (B, C), and
        its published parameter counts.

    Example:
        >>> with torch.device("meta"):
        ...     model = unet(5, 64)
        >>> len(model), sum(p.numel() for p in model.parameters())
        (241, 232687328)
        >>> tiny = unet(1, 4, depth=1)
        >>> [name for name, _ in tiny.named_children()][4:7]
        ['encoder_0_skip', 'encoder_0_down', 'bottleneck_0_conv']
    """
    given = {"B": B, "C": C, "depth": depth}
    given |= {"in_channels": in_channels, "out_channels": out_channels}
    check_arguments("unet", given)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    namespaces = [Namespace() for _ in range(depth)]
    channels = in_channels
    for level, namespace in enumerate(namespaces):
        outer = C * 2**level
        layers |= _convolutions(f"encoder_{level}_encode", B, channels, outer, outer)
        layers[f"encoder_{level}_skip"] = _isolated(StashSkip(), namespace)
        layers[f"encoder_{level}_down"] = nn.MaxPool2d(2)
        channels = outer
    layers |= _convolutions("bottleneck", B, channels, 2 * channels, channels)
    for index, namespace in enumerate(reversed(namespaces)):
        # The input has as many channels as the skip.
        outer = channels // 2
        layers[f"decoder_{index}_up"] = nn.Upsample(scale_factor=2)
        layers[f"decoder_{index}_skip"] = _isolated(JoinSkip(), namespace)
        layers |= _convolutions(f"decoder_{index}_decode", B, 2 * channels, outer, outer)
        channels = outer
    layers["segment"] = nn.Conv2d(channels, out_channels, 1, bias=False)
    return nn.Sequential(layers)


def _isolated(layer: Any, namespace: Namespace) -> nn.Module:
    # What `skippable` adds to a class is not visible to type checkers.
    isolated: nn.Module = layer.isolate(namespace)
    return isolated


def _convolutions(
    prefix: str, count: int, channels: int, inner: int, outer: int
) -> OrderedDict[str, nn.Module]:
    """Return `count` convolutions and what follows each, by name; only the last outputs `outer`."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, outputs in enumerate([inner] * (count - 1) + [outer]):
        for part, layer in _convolution(channels, outputs):
            layers[f"{prefix}_{index}_{part}"] = layer
        channels = outputs
    return layers


def _convolution(channels: int, outputs: int) -> Iterator[tuple[str, nn.Module]]:
    yield "conv", nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
    yield "dropout", nn.Dropout2d(0.1)
    yield "norm", nn.InstanceNorm2d(outputs)
    yield "relu", nn.LeakyReLU(0.01)
