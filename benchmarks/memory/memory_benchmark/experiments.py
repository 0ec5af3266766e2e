"""The published experiments: models, settings, and the figures to compare ours with.

torchgpipe's figures are from its documentation (version 0.0.7, page "Benchmarks"), its balances and
settings from the programs that the page links to; those of the GPipe paper are of its table 1
(Huang et al., NeurIPS 2019). The paper writes GB, for accelerators of another kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal.models import amoebanetd, unet

__all__ = ["EXPERIMENTS", "Experiment", "reduced"]


@dataclass(frozen=True)
class Experiment:
    """One row of a published table.

    Attributes:
        name: What it is called there.
        model: ``'amoebanetd'`` or ``'unet'``.
        size: Its two sizes: (L, D) or (B, C).
        rows: Images of a mini-batch.
        image_size: Pixels of the side of an image.
        chunks: Micro-batches of a mini-batch; 1: the plain model.
        balance: torchgpipe's; layers of each partition.
        published_model: Model memory that torchgpipe states, in GiB; None: it does not.
        published_activations: Its peak activation memory, in GiB.
        published_total: Its peak memory, model and all, in GiB.
        paper_model: Model memory of the GPipe paper, in GB.
        paper_activations: Peak activation memory of the GPipe paper, in GB.
        foreach: Whether the optimizer steps all parameters at once; None: as torch decides.
    """

    name: str
    model: str
    size: tuple[int, int]
    rows: int
    image_size: int
    chunks: int
    balance: tuple[int, ...]
    published_model: float | None = None
    published_activations: float | None = None
    published_total: float | None = None
    paper_model: float | None = None
    paper_activations: float | None = None
    foreach: bool | None = False

    @property
    def key(self) -> str:
        """A name that no other experiment has."""
        return f"{self.model} {self.name}"

    @property
    def is_plain(self) -> bool:
        """Whether it is the plain model, without micro-batches and recomputes."""
        return self.name == "naive-1"

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are recomputed."""
        return "never" if self.is_plain else "except_last"

    @property
    def per_parameter(self) -> int:
        """How many numbers there are for each parameter: it, its gradient, optimizer state."""
        return 3 if self.model == "amoebanetd" else 2

    @property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss."""
        amoeba = self.model == "amoebanetd"
        return F.cross_entropy if amoeba else F.binary_cross_entropy_with_logits

    @property
    def make_optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Makes the optimizer of a list of parameters.

        It steps one parameter after the other, unless told otherwise, as torch 1.3 did.
        """
        if self.model == "amoebanetd":
            return partial(torch.optim.RMSprop, foreach=self.foreach)
        return partial(torch.optim.SGD, lr=0.1, foreach=self.foreach)

    def build(self) -> nn.Sequential:
        """Build the model on the current device."""
        return amoebanetd(*self.size) if self.model == "amoebanetd" else unet(*self.size)

    def make_data(self) -> tuple[Tensor, Tensor]:
        """Make a mini-batch and its target on the current device."""
        images = torch.randn(self.rows, 3, self.image_size, self.image_size)
        if self.model == "amoebanetd":
            return images, torch.randint(1000, (self.rows,))
        return images, torch.rand(self.rows, 1, self.image_size, self.image_size)


def reduced(experiment: Experiment) -> Experiment:
    """Return the same experiment so small that any machine can run it.

    As many layers in the same balance, but fewer channels, smaller and fewer images.

    Example:
        >>> small = reduced(EXPERIMENTS[4])
        >>> small.name, small.size, small.rows, small.balance == EXPERIMENTS[4].balance
        ('pipeline-8', (72, 32), 8, True)
    """
    depth, _ = experiment.size
    amoeba = experiment.model == "amoebanetd"
    return Experiment(
        experiment.name,
        experiment.model,
        (depth, 32 if amoeba else 4),
        rows=8,
        image_size=64,
        chunks=1 if experiment.is_plain else 8,
        balance=experiment.balance,
    )


_amoebanet = partial(Experiment, model="amoebanetd", rows=128, image_size=224)
_unet = partial(Experiment, model="unet", rows=32, image_size=192)

#: All experiments, in the order of the published tables.
EXPERIMENTS = (
    _amoebanet(
        "naive-1",
        size=(18, 208),
        chunks=1,
        balance=(24,),
        published_model=0.91,
        paper_model=1.05,
        paper_activations=6.26,
    ),
    _amoebanet(
        "pipeline-1",
        size=(18, 416),
        chunks=128,
        balance=(24,),
        published_model=3.57,
        published_activations=0.91,
        paper_model=3.8,
        paper_activations=3.46,
    ),
    _amoebanet(
        "pipeline-2",
        size=(18, 544),
        chunks=128,
        balance=(16, 8),
        published_model=6.07,
        published_activations=3.39,
        paper_model=6.45,
        paper_activations=8.11,
    ),
    _amoebanet(
        "pipeline-4",
        size=(36, 544),
        chunks=128,
        balance=(16, 12, 7, 7),
        published_model=11.80,
        published_activations=6.91,
        paper_model=12.53,
        paper_activations=15.21,
    ),
    _amoebanet(
        "pipeline-8",
        size=(72, 512),
        chunks=128,
        balance=(23, 16, 11, 6, 6, 5, 5, 6),
        published_model=20.62,
        published_activations=10.83,
        paper_model=24.62,
        paper_activations=26.24,
    ),
    _unet("naive-1", size=(6, 72), chunks=1, balance=(285,), published_total=20.3),
    _unet("pipeline-1", size=(11, 128), chunks=32, balance=(505,), published_total=20.5),
    _unet("pipeline-2", size=(24, 128), chunks=32, balance=(526, 551), published_total=43.4),
    _unet(
        "pipeline-4", size=(24, 160), chunks=32, balance=(472, 54, 36, 515), published_total=79.1
    ),
    _unet(
        "pipeline-8",
        size=(48, 160),
        chunks=32,
        balance=(800, 140, 62, 36, 36, 36, 36, 987),
        published_total=154.1,
    ),
)
