"""The published experiments: models, runs, and the speeds to compare ours with.

torchgpipe's throughputs are from its documentation (version 0.0.7, page "Benchmarks"), measured on
Tesla P40; its batches, chunks and balances from the programs that the page links to. The ratios of
the GPipe paper stand on the same page: figure 3 (b) of its fourth version for ResNet-101, table 2
for AmoebaNet-D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models import amoebanetd, resnet101, unet
from gpipebal.schedule import CheckpointMode


@dataclass(frozen=True)
class Run:
    """One line of a published table.

    Attributes:
        name: What it is called there.
        batch: Images of a mini-batch.
        chunks: Micro-batches.
        balance: Layers of each partition.
        throughput: Images a second that torchgpipe reached.
        paper: The speed of the GPipe paper, by that of the run that others are compared with.
        checkpoint: Which micro-batches are recomputed.
    """

    name: str
    batch: int
    chunks: int
    balance: tuple[int, ...]
    throughput: float
    paper: float | None = None
    checkpoint: CheckpointMode = "except_last"

    @property
    def n_partitions(self) -> int:
        """Number of partitions, each on a device."""
        return len(self.balance)

    @property
    def rows(self) -> int:
        """Images of the largest micro-batch."""
        return -(-self.batch // self.chunks)


@dataclass(frozen=True)
class SpeedModel:
    """A model, its published runs, and the sizes at which it is looked at.

    Attributes:
        name: Its name.
        about: What it is, in a few words.
        build: Makes it on the current device, at a fraction of its width for a CPU.
        loss_fn: The loss.
        image_size: Pixels of the side of an image.
        runs: The published runs; speeds are by that of the first.
        equal_batch: Images of a mini-batch that all numbers of devices have.
        small_about: What of it is small enough for a CPU.
        small_image_size: Pixels there.
        small_rows: Images of a micro-batch there.
    """

    name: str
    about: str
    build: Callable[[bool], nn.Sequential]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    image_size: int
    runs: tuple[Run, ...]
    equal_batch: int
    small_about: str
    small_image_size: int
    small_rows: int

    def make_data(self, rows: int, *, small: bool = False) -> tuple[Tensor, Tensor]:
        """Make a mini-batch and its target on the current device."""
        size = self.small_image_size if small else self.image_size
        images = torch.randn(rows, 3, size, size)
        if self.name == "unet":
            return images, torch.ones(rows, 1, size, size)
        return images, torch.randint(1000, (rows,))

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer that torchgpipe's programs use."""
        return torch.optim.SGD(parameters, lr=0.1)

    def rows_of_published(self, n_partitions: int) -> int:
        """Images of a micro-batch in torchgpipe's run of most micro-batches on so many devices."""
        runs = [run for run in self.runs if run.n_partitions == n_partitions]
        # The plain model is no run of a pipeline.
        several = [run for run in runs if run.chunks > 1]
        return max(several or runs, key=lambda run: run.chunks).rows


#: The plain model has one micro-batch and recomputes nothing.
_PLAIN: CheckpointMode = "never"

MODELS = (
    SpeedModel(
        "resnet101",
        "ResNet-101, 224 x 224, cross entropy",
        lambda small: resnet101(),
        F.cross_entropy,
        image_size=224,
        runs=(
            Run("naive-1", 118, 1, (370,), 95.862, 1.0, _PLAIN),
            Run("pipeline-1", 220, 2, (370,), 81.796, 0.80),
            Run("pipeline-2", 25_000, 1667, (135, 235), 135.539, 1.42),
            Run("pipeline-4", 5_632, 256, (44, 92, 124, 110), 265.958, 2.18),
            Run("pipeline-8", 5_400, 150, (26, 22, 33, 44, 44, 66, 66, 69), 411.662, 2.89),
        ),
        equal_batch=120,
        small_about="ResNet-101, 64 x 64",
        small_image_size=64,
        small_rows=4,
    ),
    SpeedModel(
        "amoebanetd",
        "AmoebaNet-D (18, 256), 224 x 224, cross entropy",
        lambda small: amoebanetd(18, 64 if small else 256),
        F.cross_entropy,
        image_size=224,
        runs=(
            Run("n=2, m=1", 96, 1, (7, 17), 26.733, 1.0, "always"),
            Run("n=2, m=4", 256, 4, (9, 15), 41.133, 1.07),
            Run("n=2, m=32", 1_280, 32, (9, 15), 47.386, 1.21),
            Run("n=4, m=1", 160, 1, (3, 4, 5, 12), 26.827, 1.13, "always"),
            Run("n=4, m=4", 360, 4, (3, 6, 7, 8), 44.543, 1.26),
            Run("n=4, m=32", 1_152, 32, (3, 6, 7, 8), 72.412, 1.84),
            Run("n=8, m=1", 196, 1, (2, 2, 2, 2, 2, 3, 4, 7), 24.918, 1.38, "always"),
            Run("n=8, m=4", 480, 4, (2, 2, 2, 3, 3, 4, 4, 4), 70.065, 1.72),
            Run("n=8, m=32", 1_280, 32, (2, 2, 2, 3, 3, 4, 4, 4), 132.413, 3.48),
        ),
        equal_batch=96,
        small_about="AmoebaNet-D (18, 64), 64 x 64",
        small_image_size=64,
        small_rows=4,
    ),
    SpeedModel(
        "unet",
        "U-Net (5, 64), 192 x 192, binary cross entropy",
        lambda small: unet(5, 8 if small else 64),
        F.binary_cross_entropy_with_logits,
        image_size=192,
        runs=(
            Run("naive-1", 40, 1, (241,), 28.500, None, _PLAIN),
            Run("pipeline-1", 80, 2, (241,), 24.456),
            Run("pipeline-2", 512, 32, (104, 137), 35.502),
            Run("pipeline-4", 512, 16, (30, 66, 84, 61), 67.042),
            Run("pipeline-8", 640, 40, (16, 27, 31, 44, 22, 57, 27, 17), 88.497),
        ),
        equal_batch=40,
        small_about="U-Net (5, 8), 64 x 64",
        small_image_size=64,
        small_rows=4,
    ),
)
