"""Known models as flat chains, each with data to train it on.

`MODELS` is what the command line looks names up in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models.resnet import resnet, resnet101

__all__ = ["MODELS", "ModelEntry", "resnet", "resnet101"]


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model, and random data of the right shape.

    Attributes:
        build: Builds the model, from the global random state.
        make_sample: Makes a mini-batch from ``(rows, image_size, seed)``.
        make_target: Makes its target from ``(rows, seed)``.
        loss_fn: Takes the model's output and the target.
        image_size: The size, in pixels, that the command line uses unless told.
        image_size_of_one_row: The smallest image that can be trained on in a micro-batch of one
            row: a batch normalisation needs more than one value per channel.
    """

    build: Callable[[], nn.Sequential]
    make_sample: Callable[[int, int, int], Tensor]
    make_target: Callable[[int, int], Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    image_size: int = 64
    image_size_of_one_row: int = 33


def random_images(rows: int, image_size: int, seed: int) -> Tensor:
    """Return `rows` images of three channels with normal noise, of shape (rows, 3, size, size)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, image_size, image_size, generator=generator)


def random_classes(rows: int, seed: int, n_classes: int = 1000) -> Tensor:
    """Return `rows` class numbers below `n_classes`, as int64."""
    # Another stream than the images': targets must not depend on how many pixels were drawn.
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(n_classes, (rows,), generator=generator)


#: Built-in models by the name that the command line takes.
MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {"resnet101": ModelEntry(resnet101, random_images, random_classes, F.cross_entropy)}
)
