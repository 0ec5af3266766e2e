"""The models: what decides time and memory is each time something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from benchmark_tools.layers import Block, by_token
from torch import Tensor, nn

from gpipebal.models import resnet
from gpipebal.skip import Namespace, pop, skippable, stash

#: A CUDA device gets so many times the rows, or it would wait for the host all the time.
ROWS_ON_CUDA = 64


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        name: Unique name.
        about: What it is, in a few words.
        layers: Makes its layers; with True, a few tiny ones.
        data: Makes inputs and target of so many rows; with True, for the tiny layers.
        loss_fn: The loss, a mean over the rows.
        optimizer: Makes the optimizer of its parameters.
        rows: Rows of a mini-batch; each number of micro-batches divides them.
        is_tiny: Whether its layers are the few tiny ones.
    """

    name: str
    about: str
    layers: Callable[[bool], Iterable[nn.Module]]
    data: Callable[[int, bool], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rows: int
    is_tiny: bool = False

    def make(self) -> nn.Sequential:
        """Make the chain; every call gives the same parameters."""
        torch.manual_seed(0)
        return nn.Sequential(*self.layers(self.is_tiny))

    def make_batch(self) -> tuple[Tensor, Tensor]:
        """Make a mini-batch and its target; every call gives the same."""
        torch.manual_seed(1)
        return self.data(self.rows, self.is_tiny)


def tiny(model: Model) -> Model:
    """Return the same model with few tiny layers and few rows: its times mean nothing."""
    return replace(model, rows=16, is_tiny=True)


def larger(model: Model, times: int = ROWS_ON_CUDA) -> Model:
    """Return the same model with so many times the rows, for a device that is so much faster."""
    return replace(
        model, about=f"{model.about}; with {times} times the rows", rows=times * model.rows
    )


@skippable(stash=["kept"])
class Keep(nn.Module):
    """Hand on the input, and keep it for the layer that pops it."""

    def forward(self, x: Tensor) -> Any:
        """Return the input."""
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Add(nn.Module):
    """Add what was kept."""

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        kept = yield pop("kept")
        return x + kept


@skippable(pop=["kept"])
class Beside(nn.Module):
    """Put what was kept beside the input, as more channels."""

    def forward(self, x: Tensor) -> Any:
        """Return both."""
        kept = yield pop("kept")
        return torch.cat([x, kept], dim=1)


class TakeOutput(nn.Module):
    """Go on with the outputs of a recurrent layer, and drop its last state."""

    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        """Return the outputs of all moments."""
        return pair[0]


class TakeState(nn.Module):
    """Go on with the last state of a recurrent layer, and drop its outputs."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Return the state of the topmost layer."""
        return pair[1][-1]


def _convolution(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    """Make a convolution, its normalisation, and a ReLU that works in place."""
    return [
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    ]


def _residual_block(channels: int) -> list[nn.Module]:
    """Make two convolutions with a skip connection past them."""
    ns = Namespace()
    first, second = _convolution(channels, channels), _convolution(channels, channels)
    return [Keep().isolate(ns), *first, *second[:2], Add().isolate(ns), nn.ReLU()]


def _down(before: int, after: int, ns: Namespace) -> list[nn.Module]:
    """Make a level of a U-Net's way down: its end is kept in the namespace, and halved."""
    return [*_convolution(before, after), Keep().isolate(ns), nn.MaxPool2d(2)]


def _up(before: int, kept: int, after: int, ns: Namespace) -> list[nn.Module]:
    """Make a level of a U-Net's way up: doubled, and what the namespace keeps beside it."""
    return [
        nn.Upsample(scale_factor=2),
        Beside().isolate(ns),
        *_convolution(before + kept, after),
    ]


def _mlp(is_tiny: bool) -> list[nn.Module]:
    pairs, width = (4, 8) if is_tiny else (8, 512)
    return [layer for _ in range(pairs) for layer in (nn.Linear(width, width), nn.ReLU())]


def _vectors(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    width = 8 if is_tiny else 512
    return torch.randn(rows, width), torch.randn(rows, width)


def _uneven(is_tiny: bool) -> list[nn.Module]:
    narrow, wide = (4, 8) if is_tiny else (128, 1536)
    layers: list[nn.Module] = [nn.Linear(2 * narrow, narrow)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(narrow, narrow)]
    layers += [nn.Linear(narrow, wide), nn.ReLU(), nn.Linear(wide, wide), nn.LayerNorm(wide)]
    layers += [nn.Linear(wide, narrow), nn.Softmax(dim=-1), nn.Linear(narrow, 4 * narrow)]
    return [*layers, nn.ReLU(), nn.Linear(4 * narrow, 2 * narrow)]


def _to_uneven(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    width = 8 if is_tiny else 256
    return torch.randn(rows, width), torch.randn(rows, width)


def _convolutions(is_tiny: bool) -> list[nn.Module]:
    width, widths = (4, (1, 2)) if is_tiny else (24, (1, 1, 2, 2, 4, 4))
    layers = _convolution(3, width)
    for before, after in pairwise(widths):
        layers += _convolution(before * width, after * width, stride=1 + (after > before))
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1] * width, 10)]


def _residual(is_tiny: bool) -> list[nn.Module]:
    width = 4 if is_tiny else 24
    layers = [*_convolution(3, width), *_residual_block(width), *_residual_block(width)]
    layers += [*_convolution(width, 2 * width, stride=2), *_residual_block(2 * width)]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)]


def _u_net(is_tiny: bool) -> list[nn.Module]:
    width = 4 if is_tiny else 16
    outer, inner = Namespace(), Namespace()
    layers = [*_down(3, width, outer), *_down(width, 2 * width, inner)]
    layers += _convolution(2 * width, 4 * width)
    layers += _up(4 * width, 2 * width, 2 * width, inner)
    layers += _up(2 * width, width, width, outer)
    return [*layers, nn.Conv2d(width, 1, 1)]


def _resnet(is_tiny: bool) -> Iterable[nn.Module]:
    blocks, width = ((1,), 4) if is_tiny else ((1, 2, 2, 1), 16)
    return resnet(blocks, num_classes=10, width=width)


def _images(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    side = 8 if is_tiny else 32
    return torch.randn(rows, 3, side, side), torch.randint(10, (rows,))


def _large_images(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    side = 32 if is_tiny else 64
    return torch.randn(rows, 3, side, side), torch.randint(10, (rows,))


def _masks(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    images, _ = _images(rows, is_tiny)
    return images, torch.rand(rows, 1, *images.shape[2:])


def _transformer(is_tiny: bool) -> list[nn.Module]:
    n_blocks, width, vocabulary = (3, 8, 32) if is_tiny else (6, 96, 4096)
    blocks = [Block(width, heads=4) for _ in range(n_blocks)]
    head = nn.Linear(width, vocabulary, bias=False)
    return [nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), head]


def _texts(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    length, vocabulary = (4, 32) if is_tiny else (32, 4096)
    tokens = torch.randint(vocabulary, (rows, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _recurrent(is_tiny: bool) -> list[nn.Module]:
    words, width = (32, 8) if is_tiny else (512, 128)
    layers: list[nn.Module] = [nn.Embedding(words, width), nn.LayerNorm(width)]
    for _ in range(2):
        layers += [nn.LSTM(width, width, batch_first=True), TakeOutput(), nn.LayerNorm(width)]
    layers += [nn.GRU(width, width, batch_first=True), TakeState()]
    return [*layers, nn.ReLU(), nn.Linear(width, 10)]


def _sentences(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    length, words = (4, 32) if is_tiny else (32, 512)
    return torch.randint(words, (rows, length)), torch.randint(10, (rows,))


def _encoder(is_tiny: bool) -> list[nn.Module]:
    n_layers, width = (3, 8) if is_tiny else (6, 96)
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        for _ in range(n_layers)
    ]
    return [nn.Dropout(0.1), *layers, nn.Dropout(0.2), nn.Linear(width, width)]


def _sequences(rows: int, is_tiny: bool) -> tuple[Tensor, Tensor]:
    shape = (4, 8) if is_tiny else (32, 96)
    return torch.randn(rows, *shape), torch.randn(rows, *shape)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-5)


_IMAGES = (_images, nn.CrossEntropyLoss(), _momentum)

#: The models. Their sizes let a step take about a tenth of a second, which is little for training
#: on a CPU, and the whole run half an hour.
MODELS = (
    Model(
        "mlp",
        "8 x (Linear 512, ReLU), 512 rows, mean square, Adam",
        _mlp,
        _vectors,
        nn.MSELoss(),
        _adam,
        rows=512,
    ),
    Model(
        "uneven",
        "narrow linear layers of 128 around one of 1536 x 1536, 384 rows, mean square, SGD",
        _uneven,
        _to_uneven,
        nn.MSELoss(),
        _momentum,
        rows=384,
    ),
    Model(
        "convolutions",
        "6 x (Conv2d 24..96, BatchNorm2d, ReLU in place) and a head, 48 images of 32 x 32, cross "
        "entropy, SGD",
        _convolutions,
        *_IMAGES,
        rows=48,
    ),
    Model(
        "residual",
        "3 residual blocks with gpipebal.skip between BatchNorm convolutions of 24 and 48 "
        "channels, 32 images of 32 x 32, cross entropy, SGD",
        _residual,
        *_IMAGES,
        rows=32,
    ),
    Model(
        "u-net",
        "2 levels down and up with gpipebal.skip across, 16 to 64 channels, 32 images of 32 x 32, "
        "mean square, Adam",
        _u_net,
        _masks,
        nn.MSELoss(),
        _adam,
        rows=32,
    ),
    Model(
        "resnet",
        "gpipebal.models.resnet((1, 2, 2, 1), width=16): 73 layers that hand on pairs, 32 images "
        "of 64 x 64, cross entropy, SGD",
        _resnet,
        _large_images,
        nn.CrossEntropyLoss(),
        _momentum,
        rows=32,
    ),
    Model(
        "transformer",
        "6 blocks of width 96, vocabulary of 4096, 16 texts of 32 tokens, cross entropy, Adam",
        _transformer,
        _texts,
        by_token,
        _adam,
        rows=16,
    ),
    Model(
        "recurrent",
        "2 x LSTM and a GRU of 128 that hand on tuples, 64 sentences of 32 words, cross entropy, "
        "Adam",
        _recurrent,
        _sentences,
        nn.CrossEntropyLoss(),
        _adam,
        rows=64,
    ),
    Model(
        "dropout",
        "6 nn.TransformerEncoderLayer of width 96 with dropout 0.1, 24 sequences of 32, mean "
        "square, Adam",
        _encoder,
        _sequences,
        nn.MSELoss(),
        _adam,
        rows=24,
    ),
)
