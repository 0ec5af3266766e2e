"""Random chains of layers, and random ways to run them, for the test of equivalence.

A chain is drawn as a list of names, so that a failing example can be read and typed in again;
`build` makes the layers. The value between two layers is a tensor, an image, or a pytree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.skip import pop, skippable, stash

#: Columns of every tensor between two layers.
WIDTH = 3


class Pair(NamedTuple):
    left: Any
    right: Any


def is_inexact(leaf: Any) -> bool:
    """Tell tensors that can have a gradient from everything else."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


class Apply(nn.Module):
    """A layer without state, made of a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Count(nn.Module):
    """Scale by a number that grows with every forward: a buffer that is written to, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * (1 + self.count)


class Half(nn.Module):
    """Leave one parameter and some columns of the input unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(1, WIDTH), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, 1:2])


class Shift(nn.Module):
    """Add parameters to a view: of one row, all gradients are one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape) + self.first.unsqueeze(0) + self.second[None]


class Make(nn.Module):
    """Turn a tensor into a pytree."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        size = y.abs().float()
        return {
            "pair": lambda: Pair(y, x),
            "none": lambda: Pair(None, (y, None)),
            "dict": lambda: {"b": {"y": y, "n": [size.argmax(1), 3]}, "a": self.other(x), "t": "s"},
            "twice": lambda: (y, y),
            "views": lambda: [y, y[:, :2], y.detach(), y.t().t()],
            "constants": lambda: (torch.ones_like(y), y, size > 0.3, 2.5, True),
            "columns": lambda: y.split(1, dim=1),
            "integers first": lambda: (size.argmax(1), y),
        }[self.form]()


class Mix(nn.Module):
    """Work on the first tensor of a pytree, hand the others on."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.linear = nn.Linear(1, 1)

    def forward(self, value: Any) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        for k, leaf in enumerate(leaves):
            if is_inexact(leaf):
                if self.writes:
                    leaf.mul_(2)
                else:
                    leaves[k] = (leaf * self.linear.weight + self.linear.bias).tanh()
                break
        return pytree.tree_unflatten(leaves, structure)


def join(value: Any) -> Tensor:
    """Make a tensor of all that is in a pytree."""
    leaves = [x for x in pytree.tree_leaves(value) if isinstance(x, (Tensor, float))]
    total = join_some(value)
    for leaf in leaves:
        if isinstance(leaf, float):
            total = total * leaf
        elif is_inexact(leaf):
            total = total + (leaf.sum(1, keepdim=True) if leaf.dim() == 2 else leaf)
        else:
            total = total + (leaf.sum(1, keepdim=True) if leaf.dim() == 2 else leaf[:, None])
    return total


def join_some(value: Any) -> Tensor:
    """Make a tensor of the first one in a pytree, and do not use the rest."""
    first = next(leaf for leaf in pytree.tree_leaves(value) if is_inexact(leaf))
    return first.sum(1, keepdim=True) * torch.arange(1, 1 + WIDTH).to(first)


def _detach_first(value: Any) -> Any:
    leaves, structure = pytree.tree_flatten(value)
    first = next(k for k, leaf in enumerate(leaves) if is_inexact(leaf))
    leaves[first] = leaves[first].detach()
    return pytree.tree_unflatten(leaves, structure)


def _without_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def _skip(name: str) -> nn.Module:
    what, number = name.split()
    if what == "pop":

        def forward(self: Any, x: Any) -> Any:
            return x + join((yield pop(number))) * 0.5

        names: Any = {"pop": [number]}
    else:

        def forward(self: Any, x: Any) -> Any:
            yield stash(number, {"stash": x, "stash2": (x * 2, None, 1.5)}[what])
            return x

        names = {"stash": [number]}
    return skippable(**names)(type("Skip", (nn.Module,), {"forward": forward}))()


_FORMS = ("pair", "none", "dict", "twice", "views", "constants", "columns", "integers first")

#: From a tensor to a tensor, whatever the dtype.
_ANY = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "half": Half,
    "shift": Shift,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "detach": lambda: Apply(Tensor.detach),
    "no graph": lambda: Apply(_without_graph),
    "view": lambda: Apply(lambda x: x.t().t()),
    "itself": lambda: Apply(lambda x: x),
    "count": Count,
    "alone": lambda: Apply(lambda x: torch.ones_like(x)),
}
_NORMS = {
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH, momentum=0.3),
    "norm without count": lambda: nn.BatchNorm1d(WIDTH, momentum=None, affine=False),
}
_REAL = {
    "dropout": lambda: nn.Dropout(0.3),
    "noise": lambda: Apply(lambda x: x + torch.rand_like(x) * torch.randn(())),
}
_WRITERS = {
    "relu_": lambda: nn.ReLU(inplace=True),
    "mul_": lambda: Apply(lambda x: x.mul_(2)),
    "dropout_": lambda: nn.Dropout(0.3, inplace=True),
}
_TO_IMAGE = {
    "image": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Unflatten(1, (2, 2, 2))),
}
_IMAGE = {
    "conv": lambda: nn.Conv2d(2, 2, 3, padding=1),
    "batchnorm2d": lambda: nn.BatchNorm2d(2),
    "relu_2d": lambda: nn.ReLU(inplace=True),
}
_FROM_IMAGE = {
    "flatten": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, WIDTH)),
}
_MIXERS = {
    "mix": Mix,
    "detach first": lambda: Apply(_detach_first),
    "reverse": lambda: Apply(lambda value: pytree.tree_leaves(value)[::-1]),
}
_JOINS = {
    "join": lambda: Apply(join),
    "join some": lambda: Apply(join_some),
}
_OTHERS = {
    "write": lambda: Mix(writes=True),
    "embedding": lambda: nn.Embedding(5, WIDTH),
}
_MAKERS: dict[str, Callable[[], nn.Module]] = {
    **_ANY,
    **_REAL,
    **_NORMS,
    **_WRITERS,
    **_TO_IMAGE,
    **_IMAGE,
    **_FROM_IMAGE,
    **_MIXERS,
    **_JOINS,
    **_OTHERS,
}
#: What hands out tensors that nobody else has, and that no backward reads: these can be written to.
_FRESH = {"", "linear", "half", "conv", "batchnorm", "batchnorm2d", "count", "alone", "mul_"}
#: What needs more than one row in every micro-batch.
NEED_ROWS = {"batchnorm", "norm without count"}
#: What needs a row in every mini-batch: `dropout_` so that it can be seen to write to its input.
NEED_ROW = {"batchnorm2d", "dropout_"}
RANDOM = {"dropout", "noise", "dropout_"}


def build(names: list[str]) -> nn.Sequential:
    """Make the layers; "shared" stands for one and the same layer, "tied" for its parameters."""
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    layers: list[nn.Module] = []
    for name in names:
        if name == "shared":
            layers.append(shared)
        elif name == "tied":
            layers.append(nn.Linear(WIDTH, WIDTH))
            layers[-1].weight = shared.weight
        elif name in _FORMS:
            layers.append(Make(name))
        elif name in _MAKERS:
            layers.append(_MAKERS[name]())
        else:
            layers.append(_skip(name))
    return nn.Sequential(*layers)


@dataclass
class Run:
    """One mini-batch: how large it is, and how it is run."""

    rows: int
    chunks: int
    modes: list[Any]
    way: str = "call"
    train: bool = True
    grad: bool = True
    input_grad: bool = True
    mean: bool = False
    frozen: set[int] = field(default_factory=set)


@dataclass
class Case:
    """A chain, how it is cut, and the mini-batches that it is given one after the other."""

    layers: list[str]
    balance: list[int]
    runs: list[Run]
    inputs: str = "tensor"
    dtype: torch.dtype = torch.float64
    deferred: bool = False


def _options(form: str, last: str, waiting: list[str], dtype: torch.dtype) -> list[list[str]]:
    """Return what can stand behind the layer `last`, by kind."""
    fresh, is_real = last in _FRESH, not dtype.is_complex
    # In few bits batch normalisation makes rounding errors as large as what is compared.
    is_exact = dtype == torch.float64
    if form == "image":
        return [
            ["conv"],
            ["batchnorm2d"] if is_exact else [],
            ["relu_2d"] if fresh else [],
            [*_FROM_IMAGE],
        ]
    if form == "tree":
        # What tanh gave cannot be written to: its backward reads it.
        writable = last in ("pair", "none", "constants")
        return [[*_MIXERS], [*_JOINS], ["write"] if writable else []]
    return [
        [*_ANY, "shared", "tied"],
        [*_FORMS],
        ["pop"] if waiting else [],
        ["stash", "stash2"],
        [*_REAL, *_TO_IMAGE] if is_real else [],
        [*_NORMS] if is_exact else [],
        [*_WRITERS] if is_real and fresh else [],
    ]


@st.composite
def chains(draw: st.DrawFn, inputs: str, dtype: torch.dtype) -> list[str]:
    """Names of layers that can stand behind each other."""
    form = {"tensor": "tensor", "tokens": "tokens"}.get(inputs, "tree")
    names: list[str] = ["embedding"] if form == "tokens" else []
    names += ["join"] if inputs == "replicated" else []
    form = "tensor" if names else form
    waiting: list[str] = []
    n_skips = 0
    for _ in range(draw(st.integers(1, 7))):
        options = _options(form, names[-1] if names else "", waiting, dtype)
        name = draw(st.sampled_from(draw(st.sampled_from([o for o in options if o]))))
        form = {"image": "image", "flatten": "tensor"}.get(name, form)
        form = "tree" if name in _FORMS else "tensor" if name in _JOINS else form
        if name in ("stash", "stash2"):
            waiting.append(str(n_skips))
            n_skips += 1
            name = f"{name} {waiting[-1]}"
        elif name == "pop":
            name = f"pop {waiting.pop(draw(st.integers(0, len(waiting) - 1)))}"
        names.append(name)
    if waiting and form != "tensor":
        names.append("flatten" if form == "image" else "join")
    return names + [f"pop {number}" for number in reversed(waiting)]


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    """A chain with everything that can happen to it."""
    # torch has no complex embeddings.
    tokens = [] if dtype.is_complex else ["tokens"]
    inputs = draw(st.sampled_from(["tensor", "tensor", "tree", "replicated", *tokens]))
    layers = draw(chains(inputs, dtype))
    cuts = [k for k in range(1, len(layers)) if draw(st.booleans())]
    balance = [b - a for a, b in pairwise([0, *cuts, len(layers)])]
    counts = any(name in NEED_ROWS for name in layers)
    modes = st.lists(
        st.sampled_from(CHECKPOINT_MODES), min_size=len(balance), max_size=len(balance)
    )
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        chunks = draw(st.integers(1, 6))
        least = 2 * chunks if counts else int(not NEED_ROW.isdisjoint(layers))
        rows = draw(st.integers(least, max(7, least + 2)))
        runs.append(
            Run(
                rows,
                chunks,
                draw(modes),
                way=draw(st.sampled_from(["call", "call", "gpipe", "1f1b", "twice", "inputs"])),
                train=draw(st.sampled_from([True, True, True, False])),
                grad=draw(st.sampled_from([True, True, True, False])),
                input_grad=draw(st.booleans()),
                mean=rows > 0 and draw(st.booleans()),
                frozen=draw(st.sets(st.integers(0, len(layers) - 1), max_size=2)),
            )
        )
    # One deferred layer cannot stand in two partitions, but ours are never shared.
    return Case(layers, balance, runs, inputs, dtype, deferred=draw(st.booleans()))
