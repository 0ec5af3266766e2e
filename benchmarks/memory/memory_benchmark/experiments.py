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


#: Of AmoebaNet-D: name, (L, D), torchgpipe's balance; model and activation memory, of torchgpipe in
#: GiB and of the GPipe paper in GB.
_AMOEBANET = (
    ("naive-1", (18, 208), (24,), 0.91, None, 1.05, 6.26),
    ("pipeline-1", (18, 416), (24,), 3.57, 0.91, 3.8, 3.46),
    ("pipeline-2", (18, 544), (16, 8), 6.07, 3.39, 6.45, 8.11),
    ("pipeline-4", (36, 544), (16, 12, 7, 7), 11.80, 6.91, 12.53, 15.21),
    ("pipeline-8", (72, 512), (23, 16, 11, 6, 6, 5, 5, 6), 20.62, 10.83, 24.62, 26.24),
)
#: Of U-Net: name, (B, C), torchgpipe's balance, and its memory in all, in GiB.
_UNET = (
    ("naive-1", (6, 72), (285,), 20.3),
    ("pipeline-1", (11, 128), (505,), 20.5),
    ("pipeline-2", (24, 128), (526, 551), 43.4),
    ("pipeline-4", (24, 160), (472, 54, 36, 515), 79.1),
    ("pipeline-8", (48, 160), (800, 140, 62, 36, 36, 36, 36, 987), 154.1),
)

#: All experiments, in the order of the published tables. Micro-batches have one image each; the
#: plain model takes the mini-batch at once.
EXPERIMENTS = (
    *(
        Experiment(
            *(name, "amoebanetd", size),
            rows=128,
            image_size=224,
            chunks=1 if name == "naive-1" else 128,
            balance=balance,
            published_model=model,
            published_activations=activations,
            paper_model=paper_model,
            paper_activations=paper_activations,
        )
        for name, size, balance, model, activations, paper_model, paper_activations in _AMOEBANET
    ),
    *(
        Experiment(
            *(name, "unet", size),
            rows=32,
            image_size=192,
            chunks=1 if name == "naive-1" else 32,
            balance=balance,
            published_total=total,
        )
        for name, size, balance, total in _UNET
    ),
)
