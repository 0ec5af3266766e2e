"""Each built-in model with random data to train it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models.amoebanet import amoebanetd
from gpipebal.models.catalogue import CATALOGUE, Description, check_arguments
from gpipebal.models.gpt import gpt
from gpipebal.models.resnet import resnet101
from gpipebal.models.unet import unet

__all__ = ["MODELS", "ModelEntry", "token_cross_entropy"]


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model, and random data of the right shape.

    `build`, `make_sample` and `make_target` know the arguments of the entry: the defaults of
    `gpipebal.models.catalogue`, or those that `configure` was given.

    Attributes:
        name: Its name.
        description: What it is and takes, in words.
        build: Builds the model, from the global random state.
        make_sample: Makes a mini-batch from ``(rows, image_size, seed)``; if the seed is None, on
            the meta device, where it takes no memory.
        make_target: Makes its target from the same.
        loss_fn: Takes the model's output and the target.
        values: The arguments of the entry.
    """

    name: str
    description: Description
    build: Callable[..., nn.Sequential]
    make_sample: Callable[..., Tensor]
    make_target: Callable[..., Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    values: Mapping[str, int | bool] = field(default_factory=dict)

    @property
    def image_size(self) -> int | None:
        """Pixels of the side of its images by default; None: it takes no images."""
        return self.description.image_size

    @property
    def smallest_image(self) -> int:
        """The smallest image that the model can be trained on."""
        return self.description.smallest_image(self.values)

    @property
    def image_size_of_one_row(self) -> int:
        """The smallest image that a micro-batch of one row can be trained on."""
        return max(self.smallest_image, self.description.image_size_of_one_row)

    def configure(self, /, **values: Any) -> ModelEntry:
        """Return the entry of the same model with some arguments changed.

        Raises:
            UsageError: a name is not known, or a value has the wrong type or is out of range.

        Example:
            >>> entry = MODELS["gpt"].configure(layers=1, width=8, heads=2, context=4)
            >>> len(entry.build()), entry.make_sample(3, None, seed=0).shape
            (5, torch.Size([3, 4]))
        """
        check_arguments(self.name, values)
        return replace(
            self,
            build=partial(self.build, **values),
            make_sample=partial(self.make_sample, **values),
            make_target=partial(self.make_target, **values),
            values=MappingProxyType({**self.values, **values}),
        )


# The makers of data take all arguments of their model, and use those that they need.


def random_images(
    rows: int, image_size: int, seed: int | None, *, in_channels: int = 3, **_: int
) -> Tensor:
    """Return images of normal noise, of shape (rows, channels, image_size, image_size)."""
    return _drawn(torch.randn, (rows, in_channels, image_size, image_size), seed=seed)


def random_classes(
    rows: int, image_size: int, seed: int | None, *, num_classes: int = 1000, **_: int
) -> Tensor:
    """Return `rows` class numbers below `num_classes`, as int64."""
    return _drawn(torch.randint, num_classes, (rows,), seed=seed, stream=1)


def random_masks(
    rows: int, image_size: int, seed: int | None, *, out_channels: int = 1, **_: int
) -> Tensor:
    """Return for every pixel a number between 0 and 1, as float32."""
    shape = (rows, out_channels, image_size, image_size)
    return _drawn(torch.rand, shape, seed=seed, stream=1)


def random_tokens(
    rows: int, image_size: int | None, seed: int | None, *, vocabulary: int, context: int, **_: int
) -> Tensor:
    """Return tokens below `vocabulary`, as int64 of shape (rows, context)."""
    return _drawn(torch.randint, vocabulary, (rows, context + 1), seed=seed)[:, :-1]


def following_tokens(
    rows: int, image_size: int | None, seed: int | None, *, vocabulary: int, context: int, **_: int
) -> Tensor:
    """Return the token that follows each of `random_tokens` in the same text."""
    return _drawn(torch.randint, vocabulary, (rows, context + 1), seed=seed)[:, 1:]


def _drawn(draw: Callable[..., Tensor], *sizes: Any, seed: int | None, stream: int = 0) -> Tensor:
    """Draw random numbers on the CPU, whatever the default device is; without a seed, none.

    Args:
        draw: One of torch's functions.
        sizes: Its arguments.
        seed: Seed of the numbers; None: only their shape is made, on the meta device.
        stream: Targets have another stream than samples, so that they do not depend on how many
            pixels of an image were drawn.
    """
    if seed is None:
        return draw(*sizes, device="meta")
    generator = torch.Generator("cpu").manual_seed(seed + stream)
    return draw(*sizes, generator=generator, device="cpu")


def token_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens of all rows.

    Args:
        logits: Logits of shape (rows, length, vocabulary).
        target: The correct tokens, of shape (rows, length).

    Example:
        >>> token_cross_entropy(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.int64)).item()
        2.079...
    """
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _entry(
    name: str,
    build: Callable[..., nn.Sequential],
    make_sample: Callable[..., Tensor],
    make_target: Callable[..., Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> ModelEntry:
    description = CATALOGUE[name]
    entry = ModelEntry(name, description, build, make_sample, make_target, loss_fn)
    defaults = {name: argument.default for name, argument in description.arguments.items()}
    return entry.configure(**defaults)


_ENTRIES = (
    _entry("resnet101", resnet101, random_images, random_classes, F.cross_entropy),
    _entry("amoebanetd", amoebanetd, random_images, random_classes, F.cross_entropy),
    _entry("unet", unet, random_images, random_masks, F.binary_cross_entropy_with_logits),
    _entry("gpt", gpt, random_tokens, following_tokens, token_cross_entropy),
)

#: Built-in models by the name that the command line takes.
MODELS: Mapping[str, ModelEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
