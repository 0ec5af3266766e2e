"""The profiler's bytes: equal to counts by hand, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.profiler.memory.backward_peaks import find_peaks
from gpipebal.profiler.memory.flops import FlopCounter
from gpipebal.profiler.memory.layer_run import BackwardRun, Surroundings
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)

#: Bytes of a float32, and of an int64.
F, I = 4, 8  # noqa: E741


def profile(model: nn.Module, sample: Any, **options: Any) -> gb.Profile:
    """Measure as little as possible, at one size, without a bar."""
    options = {"rows": (), "timeout": 0, "as_pipeline": False, "progress": False, **options}
    return gb.profile_model(model, sample, **options)


class Attention(nn.Module):
    """Attention written out: queries, keys, values, a softmax, and their product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1)
        return weights @ self.v(x)


class Residual(nn.Module):
    """What goes in is added to what comes out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Nearest(nn.Module):
    """Chooses the nearest of some points. The graph of the distances is gone when it has chosen."""

    def forward(self, x: Tensor) -> Tensor:
        for n_points in (50, 40, 30, 20):
            points = torch.linspace(-1.0, 1.0, n_points)
            nearest = (x.unsqueeze(-1) - points).square().argmin(-1)
        return (x.exp() * 2.0).sin().cos() * nearest.float()


class Counted(NamedTuple):
    """A model, its input, the bytes that each layer saves, and those of their union."""

    model: Callable[[], nn.Sequential]
    sample: Callable[[], Tensor]
    layers: list[int]
    union: int


MODELS = {
    # A linear layer keeps its input, a ReLU its output: which is the next one's input.
    "mlp": Counted(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        lambda: torch.randn(6, 8),
        [F * 6 * 8, F * 6 * 16, F * 6 * 16],
        F * 6 * (8 + 16),
    ),
    # Tanh keeps its output, and the second one too; nothing is shared but that.
    "tanh twice": Counted(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()),
        lambda: torch.randn(5, 4),
        [F * 5 * 4, F * 5 * 4, F * 5 * 4],
        F * 5 * 4 * 3,
    ),
    # GELU and SiLU keep their input.
    "gelu": Counted(
        lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.SiLU()),
        lambda: torch.randn(3, 8),
        [F * 3 * 8, F * 3 * 12, F * 3 * 12],
        F * 3 * (8 + 12 + 12),
    ),
    # A convolution keeps its input; batch normalisation its input, a mean and a deviation per
    # channel; a ReLU in place keeps what it made of its input, which the pooling keeps too, beside
    # the place of each maximum.
    "convolution": Counted(
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        ),
        lambda: torch.randn(2, 3, 8, 8),
        [
            F * 2 * 3 * 64,
            F * 2 * 5 * 64 + F * 2 * 5,
            F * 2 * 5 * 64,
            F * 2 * 5 * 64 + I * 2 * 5 * 16,
        ],
        F * 2 * (3 + 5 + 5) * 64 + F * 2 * 5 + I * 2 * 5 * 16,
    ),
    # Layer normalisation keeps its input, and a mean and a deviation per row.
    "layer norm": Counted(
        lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)),
        lambda: torch.randn(7, 16),
        [F * 7 * 16 + 2 * F * 7, F * 7 * 16],
        2 * F * 7 * 16 + 2 * F * 7,
    ),
    # An embedding keeps the indices.
    "embedding": Counted(
        lambda: nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)),
        lambda: torch.randint(0, 10, (6, 3)),
        [I * 6 * 3, 0, F * 6 * 12],
        I * 6 * 3 + F * 6 * 12,
    ),
    # Dropout keeps a factor for every value.
    "dropout": Counted(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        lambda: torch.randn(4, 8),
        [F * 4 * 8, F * 4 * 8, F * 4 * 8],
        3 * F * 4 * 8,
    ),
    # A softmax keeps its output, which is read by the product behind it; three linear layers keep
    # one input.
    "attention": Counted(
        lambda: nn.Sequential(nn.Linear(6, 6), Attention(6)),
        lambda: torch.randn(2, 5, 6),
        [F * 2 * 5 * 6, F * 2 * 5 * 6 * (1 + 3) + F * 2 * 5 * 5],
        F * 2 * 5 * 6 * (1 + 1 + 3) + F * 2 * 5 * 5,
    ),
    # The sum of a residual block keeps nothing: its two sides get one gradient.
    "residual": Counted(
        lambda: nn.Sequential(nn.Linear(8, 8), Residual(8), Residual(8)),
        lambda: torch.randn(4, 8),
        [F * 4 * 8, 2 * F * 4 * 8, 2 * F * 4 * 8],
        5 * F * 4 * 8,
    ),
    # Frozen layers before the first that trains keep nothing; behind it, what the gradient of
    # their input needs: a linear layer only its weight.
    "frozen": Counted(
        lambda: _frozen(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
            (0, 4),
        ),
        lambda: torch.randn(9, 4),
        [0, 0, F * 9 * 4, F * 9 * 8, 0],
        F * 9 * (4 + 8),
    ),
    # Pooling and flattening keep shapes, not values.
    "pooling": Counted(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 3), nn.LogSoftmax(1)
        ),
        lambda: torch.randn(4, 1, 8, 8),
        [F * 4 * 64, F * 4 * 2 * 36, 0, F * 4 * 18, F * 4 * 3],
        F * 4 * (64 + 2 * 36 + 18 + 3),
    ),
    "results that are thrown away": Counted(
        lambda: nn.Sequential(nn.Linear(5, 6), *(Nearest() for _ in range(4))),
        lambda: torch.randn(4, 5),
        # What exp returns, what sin and cos are given, and the nearest.
        [F * 4 * 5, *[F * 4 * 4 * 6] * 4],
        F * (4 * 5 + 4 * 4 * 4 * 6),
    ),
}


def _frozen(model: nn.Sequential, layers: tuple[int, ...]) -> nn.Sequential:
    for k in layers:
        model[k].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_are_a_count_by_hand(name: str) -> None:
    """What every layer saves, and what all save together, is the hand count to the byte."""
    counted = MODELS[name]
    result = profile(counted.model(), counted.sample())
    assert [result.bytes_of(layer.saved) for layer in result.layers] == counted.layers
    assert result.bytes_of(s for layer in result.layers for s in layer.saved) == counted.union


def test_peaks_of_known_layers() -> None:
    """Peaks of forwards and backwards are what is made and held at once, counted by hand."""
    rows = 6
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    layers = profile(model, torch.randn(rows, 8)).layers
    made = [F * rows * n for n in (16, 16, 4)]
    assert [layer.forward_peak_bytes for layer in layers] == made
    assert [layer.no_grad_forward_peak_bytes for layer in layers] == made
    # Gradients of weight and bias, and of the input; nobody wants that of the chain's input.
    backward = [F * (8 * 16 + 16), F * rows * 16, F * (16 * 4 + rows * 16)]
    assert [layer.backward_peak_bytes for layer in layers] == backward
    assert [layer.accumulating_peak_bytes for layer in layers] == backward


def test_a_forward_without_a_graph_holds_less() -> None:
    """What only the backward needs is not held by a forward without a graph."""
    model = nn.Sequential(nn.Sequential(*[nn.Linear(8, 8), nn.Tanh()] * 3))
    layer = profile(model, torch.randn(5, 8)).layers[0]
    # With a graph: every linear output until its tanh is done, and every tanh output.
    assert layer.forward_peak_bytes == F * 5 * 8 * (3 + 1)
    # Without: a tanh, its input, and nothing else.
    assert layer.no_grad_forward_peak_bytes == F * 5 * 8 * 2


def test_gradients_that_exist_are_added_to() -> None:
    """Where gradients exist, those of one parameter after the other come and go."""
    width, rows = 16, 2
    inner = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    layer = profile(nn.Sequential(inner), torch.randn(rows, width)).layers[0]
    weight, row = F * width * width, F * rows * width
    # All three gradients; the two saved inputs are gone by then.
    assert layer.backward_peak_bytes == 3 * weight - 2 * row + row
    # One gradient of a weight, and what goes on to the layer before.
    assert layer.accumulating_peak_bytes == weight + row


def test_the_loss_is_a_layer_behind_the_last() -> None:
    """Cross entropy keeps the logarithms of all probabilities; its target is not its own."""
    rows, classes, chunks = 6, 100, 3
    model = nn.Sequential(nn.Linear(8, classes))
    result = profile(
        model,
        torch.randn(rows, 8),
        chunks=chunks,
        loss_fn=nn.functional.cross_entropy,
        target=torch.zeros(rows, dtype=torch.long),
    )
    loss, whole = result.step.loss, result.step.whole_loss
    assert loss is not None and whole is not None
    for term, n in ((loss, rows // chunks), (whole, rows)):
        assert result.bytes_of(term.saved) == F * n * classes + F  # and the weight of all rows
        assert term.buffer_bytes == I * n
        assert term.output_bytes == F
        assert term.forward_peak_bytes == F * n * classes + 2 * F
        # The gradients of the logarithms and of the logits.
        assert 2 * F * n * classes - F <= term.backward_peak_bytes <= 2 * F * n * classes + F
        assert term.forward_time > 0 and term.backward_time > 0
    assert result.bytes_of(result.step.gathered) == F * rows * classes
    assert not set(result.step.gathered) & set(result.layers[0].outputs)


def test_a_loss_shares_what_it_keeps() -> None:
    """A loss that reads the output in its backward holds the last layer's output, not a copy."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    result = profile(model, torch.randn(6, 4), loss_fn=lambda y: y.square().mean())
    assert result.step.loss is not None and result.step.whole_loss is not None
    assert set(result.step.loss.saved) == set(result.layers[1].outputs)
    # One micro-batch is the mini-batch: gathering it makes nothing new.
    assert result.step.gathered == result.layers[1].outputs
    assert set(result.step.whole_loss.saved) == set(result.layers[1].outputs)


def test_a_loss_with_parameters_is_left_alone() -> None:
    """A module, or a function around one, has no gradients and the same counts afterwards."""
    loss = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
    for loss_fn in (Mean(loss), lambda y: loss[0](y).mean()):
        result = profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4), loss_fn=loss_fn)
        assert result.step.loss is not None and result.step.loss.backward_time > 0
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert loss[1].num_batches_tracked == 0


class Mean(nn.Module):
    """The mean of what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, output: Tensor) -> Tensor:
        return self.module(output).mean()


@skippable(stash=["early"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = x * 2
        yield stash("early", early)
        return torch.relu(early)


@skippable(pop=["early"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x * early


def test_skips_have_storages_of_their_own() -> None:
    """A skip names the layers at its ends and its storages, and who reads it shares those."""
    model = nn.Sequential(nn.Linear(4, 4), Keep(), nn.Linear(4, 4), Join(), nn.Linear(4, 1))
    result = profile(model, torch.randn(6, 4), chunks=2)
    (skip,) = result.skips
    assert (skip.name, skip.source, skip.destination) == ("early", 1, 3)
    assert result.bytes_of(skip.storages) == F * 3 * 4
    assert set(skip.storages) < set(result.layers[3].saved)
    assert not set(skip.storages) & set(result.layers[1].outputs)
    # The layer that stashes keeps what its ReLU made, and nothing for its skip.
    assert result.layers[1].saved == result.layers[1].outputs
    assert gb.Profile.from_dict(result.to_dict()) == result


class Hands(nn.Module):
    """Hand on a value several times, and a number, or its parts."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Takes(nn.Module):
    """Add up what has a gradient."""

    def forward(self, values: Any) -> Tensor:
        return torch.stack([value.float().sum(1) for value in values]).sum(0)


@pytest.mark.parametrize(
    ("make", "n_bytes"),
    [
        (lambda x: (x, x), 48 * F),
        (lambda x: (x.tanh(), x), 48 * F),
        (lambda x: (x, x.detach()), 24 * F),
        (lambda x: x.chunk(2, 1), 24 * F),
        (lambda x: (x[:, :4], x, x), (16 + 48) * F),
        (lambda x: (x[:, :1].expand(4, 6), x.long()), 24 * F),
        (lambda x: (x.long(), x.long()), 0),
    ],
)
def test_gradients_are_of_tensors_and_not_of_storages(make: Any, n_bytes: int) -> None:
    """A tensor that is handed on twice gets two, a part of one as much as it has itself."""
    model = nn.Sequential(nn.Linear(3, 6), Hands(make), Takes())
    x = torch.randn(4, 3)
    measured = profile(model, x)
    estimated = gb.profile_model(model, x, method="estimate", progress=False)
    for found in (measured, estimated):
        gradients = [layer.output_gradient_bytes for layer in found.layers]
        assert gradients == [24 * F, n_bytes, 4 * F if n_bytes else 0]


def test_autocast_casts_count_while_the_graph_holds_them() -> None:
    """Under autocast the casts of input and weight are saved, and nothing that only a cache has."""
    rows, half = 8, 2
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = profile(model, torch.randn(rows, 64))
    assert result.provenance["autocast"] == "bfloat16"
    # The first needs no gradient of its input, so it does not keep its weight.
    assert [result.bytes_of(layer.saved) for layer in result.layers] == [
        half * rows * 64,
        half * (rows * 64 + 64 * 32),
    ]


class ProductInBackward(torch.autograd.Function):
    """A product of matrices in the backward, which autocast would cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ torch.eye(gradient.shape[1])


class CastOnlyForward(nn.Module):
    """Return a tensor of single precision, whatever autocast is on."""

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", ProductInBackward.apply(x.float()))


def test_a_backward_under_autocast_runs_without_it_as_in_a_worker() -> None:
    """What its operations need is what they need without autocast: nothing is cast."""
    rows, width = 64, 64
    model = nn.Sequential(nn.LayerNorm(width), CastOnlyForward(), nn.Identity())
    plain = profile(model, torch.randn(rows, width))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = profile(model, torch.randn(rows, width))
        assert torch.is_autocast_enabled("cpu")
    assert result.layers[1].backward_peak_bytes == plain.layers[1].backward_peak_bytes
    assert plain.layers[1].backward_peak_bytes == F * (width * width + rows * width)


class NotesAutocast(torch.autograd.Function):
    """Notes whether autocast is on in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[bool]) -> Tensor:
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append(torch.is_autocast_enabled("cpu"))
        return gradient, None


@pytest.mark.parametrize("way", [{"as_pipeline": True}, {"one_at_a_time": True}])
def test_no_backward_of_a_loss_has_autocast(way: dict[str, bool]) -> None:
    """Neither where it is measured nor where the pipeline is tried out."""
    notes: list[bool] = []

    def loss(output: Tensor) -> Tensor:
        return cast("Tensor", NotesAutocast.apply(output.float(), notes)).sum()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile(model, torch.randn(8, 4), loss_fn=loss, **way)
        assert torch.is_autocast_enabled("cpu")
    assert notes and not any(notes)


class Turned(nn.Module):
    """Makes two values that lie turned around, as those of recurrent layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.transpose(1, 2), x.tanh().transpose(1, 2)


class Product(nn.Module):
    """Multiplies two values."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] * value[1]


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_the_gradient_of_joined_outputs_is_not_turned_around(method: str) -> None:
    """So those that the last layer makes of it are copied, one by one, to lie as its input does."""
    rows, columns, width = 4, 6, 16
    model = nn.Sequential(nn.Linear(width, width), Turned(), Product())
    sample, n_bytes = torch.randn(2 * rows, columns, width), F * rows * columns * width
    if method == "estimate":
        result = gb.profile_model(model, sample, chunks=2, method="estimate", progress=False)
    else:
        result = profile(model, sample, chunks=2)
    assert result.layers[2].backward_peak_bytes == 3 * n_bytes


class UsedTwice(nn.Linear):
    """Multiplies with its weight twice, as a recurrent layer does at each time; may cast itself."""

    def __init__(self, n: int, *, casts: bool) -> None:
        super().__init__(n, n, bias=False)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.casts else nullcontext():
            return super().forward(super().forward(x))


@pytest.mark.parametrize("casts", [False, True])
def test_autocast_casts_a_parameter_at_each_use_as_workers_do(casts: bool) -> None:
    """Each cast of the weight is another storage, as torch's cache of casts is off in workers."""
    rows, half = 8, 2
    model = nn.Sequential(nn.Linear(64, 64), UsedTwice(64, casts=casts))
    around = nullcontext() if casts else torch.autocast("cpu", dtype=torch.bfloat16)
    with around:
        result = profile(model, torch.randn(rows, 64))
        assert torch.is_autocast_cache_enabled()
    assert result.bytes_of(result.layers[1].saved) == 2 * half * (rows * 64 + 64 * 64)


class CastsItself(nn.Linear):
    """Is given its autocast, and with it a cache of casts, when its class is made."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_casts_of_a_decorated_forward_do_not_outlive_a_cell() -> None:
    """Each forward casts the weight, also in a block of the caller's, where caches are kept."""
    rows, half = 8, 2
    model = nn.Sequential(nn.Linear(64, 64), CastsItself(64, 64, bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = profile(model, torch.randn(rows, 64))
    assert result.layers[1].forward_peak_bytes == half * (rows * 64 + 64 * 64)


def test_flops_are_those_of_torchs_formulas() -> None:
    """Two operations per multiplication and addition; what is not counted is None or 0."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    result = profile(model, torch.randn(6, 8), chunks=2)
    assert [layer.flops for layer in result.layers] == [2 * 3 * 8 * 16, 0, 2 * 3 * 16 * 4]


def test_one_layer_at_a_time_needs_the_memory_of_one() -> None:
    """While a model is profiled layer by layer, no more lives than one layer's share."""
    width, n_layers = 256, 12
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(n_layers)))
    sample = torch.randn(4, width)
    layer = F * width * (width + 1)

    def peak(**options: Any) -> int:
        ledger = Ledger()
        ledger.hold([sample, *model.parameters()], 0)
        before = ledger.start_peak()
        with ledger.watch(0):
            profile(model, sample, chunks=2, **options)
        return ledger.total_peak - before

    # Its parameters, its gradients, and the gradients that are added to those; and the values
    # that are on their way, which are small here.
    assert peak(one_at_a_time=True) < 3 * layer + 64 * sample.nbytes


class Sequences(nn.Module):
    """A recurrent layer of two directions over sequences, without its last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.rnn(x)[0]
        return output


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_flops_of_a_recurrent_layer_are_those_of_its_products(kind: type[nn.RNNBase]) -> None:
    """Every matrix of weights meets every token once, in one kernel or in many."""
    layer = Sequences(kind)
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    result = profile(nn.Sequential(layer), torch.randn(3, 5, 8))
    assert result.layers[0].flops == 2 * 3 * 5 * matrices


def test_flops_of_fused_attention_are_those_of_its_products() -> None:
    """Scores and values are two products of matrices, also where no matrix of scores exists."""

    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    result = profile(nn.Sequential(Fused()), torch.randn(2, 4, 16, 8))
    assert result.layers[0].flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)


class Pairs(nn.Module):
    """Multiplies its input with itself by a matrix for each feature: in one kernel, or in two."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.randn(5, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.split([3, 4], -1)
        if self.fused:
            return nn.functional.bilinear(one, other, self.weight)
        left = torch.einsum("ni,oij->noj", one, self.weight)
        return torch.einsum("noj,nj->no", left, other)


def test_flops_of_a_bilinear_layer_are_those_of_its_two_products() -> None:
    """Its three inputs are multiplied in one kernel, also in its backward."""
    fused, plain = (profile(nn.Sequential(Pairs(f)), torch.randn(6, 7)) for f in (True, False))
    assert fused.layers[0].flops == plain.layers[0].flops == 2 * 6 * 5 * (3 * 4 + 4)
    model = nn.Sequential(nn.Bilinear(3, 4, 5))
    given = torch.randn(6, 3), torch.randn(6, 4)
    for mode in (nullcontext(), torch.no_grad()):
        with FlopCounter() as counter, mode:
            output = model[0](*(x.requires_grad_() for x in given))
        assert counter.total == 2 * 6 * 5 * (3 * 4 + 4)
        if output.requires_grad:
            with FlopCounter() as counter:
                output.sum().backward()
            # Once for each input and for the weight, at most as much and at least the products.
            assert 3 * 2 * 6 * 5 * 3 * 4 <= counter.total <= 3 * 2 * 6 * 5 * (3 * 4 + 4)


class Rounded(nn.Linear):
    """Multiplies with rounded weights; the graph of the rounding is gone by then."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; the gradient is that of the weights themselves."""
        weight = self.weight
        scale = weight.detach().abs().amax() / 7
        rounded = weight + ((weight / scale).round().clamp(-8, 7) * scale - weight).detach()
        return nn.functional.linear(x, rounded, self.bias)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_what_is_saved_is_in_the_order_of_saving(width: int) -> None:
    """Also where a key was that of something else before: profiles of a model are the same."""
    model = nn.Sequential(nn.BatchNorm1d(width), Rounded(width, width), nn.Linear(width, 8))
    given: Any = {"rows": (), "progress": False}
    estimated = gb.profile_model(model, torch.randn(32, width), method="estimate", **given)
    given |= {"timeout": 0, "as_pipeline": False}
    measured = gb.profile_model(model, torch.randn(32, width), **given)
    assert [layer.saved for layer in measured.layers] == [la.saved for la in estimated.layers]


def test_what_a_refused_backward_has_made_is_dropped() -> None:
    """A kernel may refuse gradients with gaps after others have made gradients of parameters."""
    weight, clean = nn.Parameter(torch.ones(2)), list[tuple[str, bool]]()
    held = BackwardRun(((frozenset(), 0),), {}, {}, {}, {}, frozenset(), False, frozenset())

    def run(around: Surroundings) -> BackwardRun:
        clean.append((around.given, weight.grad is None))
        weight.grad = torch.ones(2)
        if around.given == "parts":
            raise ProfileError("a gradient has gaps")
        return held

    find_peaks(run, held, [weight], finds_inside=False)
    # First where gradients exist, and then where none do.
    added, new = clean[:5], clean[5:]
    assert [given for given, _ in added] == ["held", "views", "own", "parts", "views"]
    assert new == [("views", True), ("own", True), ("parts", True), ("views", True)]
