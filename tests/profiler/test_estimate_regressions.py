"""Estimates and matches of profiles: single cases that were wrong once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    grid_sample,
    max_pool2d,
    max_unpool2d,
    one_hot,
    scaled_dot_product_attention,
)

import gpipebal as gb
from gpipebal.errors import ProfileError


class Sampled(nn.Module):
    """Looks at an image in places that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.rand(1, 8, 8, 2) * 2 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return grid_sample(x, self.grid.expand(len(x), 8, 8, 2), align_corners=False)


def frozen(layer: Any) -> nn.Module:
    """Let a convolution train its bias alone."""
    layer.weight.requires_grad_(False)
    return layer  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Begins a vision transformer: its convolution gets its gradient in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, 32, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(x), 1, 32), patches), 1)


class Turned(nn.Module):
    """Works on sequences whose columns are channels, or on images that lie on their side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(-1, -2)).transpose(-1, -2)  # type: ignore[no-any-return]


class OfFunction(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Looked(nn.Module):
    """Looks rows up in a table whose gradient is sparse, each time other ones."""

    def __init__(self, n_times: int = 1, *, padding: bool = False) -> None:
        super().__init__()
        self.n_times = n_times
        last = 16 * n_times if padding else None  # this one is not looked up
        self.table = nn.Embedding(16 * n_times + padding, 64, padding_idx=last, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.table(x.argmax(1) + 16 * i) for i in range(self.n_times)]
        return sum(rows) + x.sum(1, keepdim=True)


class Experts(nn.Module):
    """A mixture of experts: rows are divided among them, for two products each."""

    def __init__(self, width: int, inside: int, n_experts: int = 3) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(n_experts, width, inside))
        self.down = nn.Parameter(torch.randn(n_experts, width, inside))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, 4, device=x.device) * len(x) // 3
        x = torch._grouped_mm(x, self.up, offs=ends.int()).relu()
        return torch._grouped_mm(x, self.down.transpose(-2, -1), offs=ends.int())


def seen_backwards(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Attend by a mask of booleans, which no fused kernel takes here."""
    q = x.view(len(x), *heads, 8, -1)
    mask = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu()
    return scaled_dot_product_attention(q, q, q[..., :3], attn_mask=mask)


PEAKS = (
    "forward_peak_bytes",
    "no_grad_forward_peak_bytes",
    "backward_peak_bytes",
    "accumulating_peak_bytes",
    "chained_peak_bytes",
    "chained_accumulating_peak_bytes",
)

CHAINS: dict[str, Any] = {
    "batch norm of turned sequences": (
        [nn.Linear(8, 8), Turned(nn.BatchNorm1d(8)), nn.Linear(8, 4)],
        (6, 5, 8),
        {},
    ),
    "batch norm of turned images": (
        [nn.Conv2d(3, 3, 1), Turned(nn.BatchNorm2d(3).eval()), nn.Flatten(), nn.Linear(48, 4)],
        (6, 3, 4, 4),
        {},
    ),
    "masked by hand": (
        [nn.Linear(64, 64), OfFunction(partial(seen_backwards, heads=(2,))), nn.Flatten()],
        (6, 64),
        {},
    ),
    "masked without heads": (
        [nn.Linear(64, 64), OfFunction(partial(seen_backwards, heads=())), nn.Flatten()],
        (6, 64),
        {},
    ),
    "one-hot": (
        [
            nn.Linear(16, 16),
            OfFunction(lambda x: one_hot(x.argmax(1), 16).sum(1, keepdim=True) * x),
        ],
        (8, 16),
        {},
    ),
    "of numbers": (
        [
            nn.Linear(16, 16),
            OfFunction(lambda x: x[:, torch.tensor([1, 2, 3], device=x.device)]),
            OfFunction(lambda x: x[:, :1] * x.new_tensor([3.0] * 64).exp()),
            OfFunction(lambda x: x * torch.scalar_tensor(2.0, device=x.device)),
            OfFunction(lambda x: x + torch.asarray([1.0] * 64, device=x.device)),
            OfFunction(lambda x: x + x.new([1.0] * 64)),
        ],
        (8, 16),
        {},
    ),
    "loss of turned outputs": (
        [nn.Linear(16, 16), OfFunction(lambda x: x.t().contiguous().t())],
        (8, 16),
        {"loss_fn": nn.HuberLoss(), "target": torch.rand(8, 16)},
    ),
    "sparse gradient": ([nn.Linear(16, 16), Looked(), nn.Tanh()], (64, 16), {}),
    "sparse gradient and padding": (
        [nn.Linear(16, 16), Looked(padding=True), nn.Tanh()],
        (64, 16),
        {},
    ),
    "sparse gradient of two": ([nn.Linear(16, 16), Looked(2), nn.Tanh()], (64, 16), {}),
    "sparse gradient of four": ([nn.Linear(16, 16), Looked(4), nn.Tanh()], (64, 16), {}),
    "binary cross entropy": (
        [nn.Linear(16, 16), nn.Sigmoid()],
        (8, 16),
        {"loss_fn": nn.BCELoss(), "target": torch.rand(8, 16)},
    ),
    "mixture of experts": ([nn.Linear(8, 8), Experts(8, 12), nn.Tanh()], (12, 8), {}),
    "mixture of experts in half precision": (
        [nn.Linear(8, 8).bfloat16(), Experts(8, 16).bfloat16(), nn.Tanh()],
        (12, 8),
        {},
    ),
    "attention of turned values": (
        [
            nn.Linear(16, 16),
            OfFunction(lambda x: scaled_dot_product_attention(*[x.transpose(-1, -2)] * 3)),
        ],
        (4, 2, 8, 16),
        {},
    ),
    "grid_sample": ([nn.Conv2d(3, 3, 1), Sampled()], (8, 3, 8, 8), {}),
    "patches": ([Patches(), nn.Tanh()], (8, 3, 16, 16), {}),
    "frozen weight": (
        [nn.Conv2d(3, 8, 3), frozen(nn.Conv2d(8, 8, 3)), nn.ReLU()],
        (8, 3, 16, 16),
        {},
    ),
    "frozen weight, transposed": (
        [nn.Conv2d(3, 4, 1), frozen(nn.ConvTranspose2d(4, 8, 3)), nn.ReLU()],
        (8, 3, 16, 16),
        {},
    ),
}


class Unpooled(nn.Module):
    """Puts the largest pixels back in their places."""

    def forward(self, x: Tensor) -> Tensor:
        return max_unpool2d(*max_pool2d(x, 2, return_indices=True), 2)


IN_ORDER: dict[str, nn.Module] = {
    "pixel_unshuffle": nn.PixelUnshuffle(2),
    "pixel_shuffle": nn.PixelShuffle(2),
    "channel_shuffle": nn.ChannelShuffle(2),
    "reflection": nn.ReflectionPad2d(1),
    "replication": nn.ReplicationPad2d(1),
    "unpooling": Unpooled(),
    "single pixels": nn.Conv2d(8, 8, 1).to(memory_format=torch.channels_last),
}


IN_SPACE: dict[str, nn.Module] = {
    "batch normalisation": nn.BatchNorm3d(4),
    "reflection": nn.ReflectionPad3d(1),
    "replication": nn.ReplicationPad3d(1),
    "group normalisation": nn.GroupNorm(2, 4),
    "group normalisation of images": nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", IN_SPACE)
def test_a_layer_after_one_that_is_approximate_is_exact(name: str) -> None:
    """It is given what lies in memory as it would on a CPU."""
    sample = torch.randn(4, 4, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    if name.endswith("images"):
        sample = torch.randn(4, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.PReLU(), IN_SPACE[name], nn.Flatten())
    fixed: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False}
    measured = gb.profile_model(model, sample, timeout=0, **fixed)
    estimate = gb.profile_model(model, sample, method="estimate", rates="CPU core", **fixed)
    for peak in PEAKS:
        assert getattr(estimate.layers[2], peak) == getattr(measured.layers[2], peak), peak
        if name.startswith("group") and peak.startswith(("backward", "accumulating")):
            assert getattr(estimate.layers[1], peak) == getattr(measured.layers[1], peak), peak


class TwiceDifferentiated(nn.Module):
    """Normalises groups, and gives the derivative; all of it can be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            ways = (x, self.norm.weight, self.norm.bias)
            found = torch.autograd.grad(self.norm(x).pow(3).sum(), ways, create_graph=True)
            return found[0] * (found[1] + found[2]).view(-1, 1, 1)


def test_group_normalisation_in_channels_last_is_differentiated_twice() -> None:
    """By torch's own formula."""
    model = nn.Sequential(nn.PReLU(), TwiceDifferentiated(), nn.Flatten())
    sample = torch.randn(4, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    options: dict[str, Any] = {"method": "estimate", "rates": "CPU core", "rows": ()}
    estimate = gb.profile_model(model, sample, chunks=2, progress=False, **options)
    assert estimate.n_layers == 3 and estimate.layers[1].backward_peak_bytes > 0


@pytest.mark.parametrize("name", IN_ORDER)
def test_an_image_keeps_its_order_of_memory(name: str) -> None:
    """Channels-last, also where only the weights of single pixels say so."""
    first: nn.Module = nn.Conv2d(3, 8, 3, padding=1)
    sample = torch.randn(4, 3, 8, 8)
    if name == "single pixels":
        first = nn.Identity()
        sample = torch.randn(4, 8, 8, 8)
    else:
        sample = sample.to(memory_format=torch.channels_last)
    channels = IN_ORDER[name](torch.zeros(1, 8, 8, 8)).shape[1]
    model = nn.Sequential(first, IN_ORDER[name], nn.Conv2d(channels, 4, 3))
    fixed: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False}
    measured = gb.profile_model(model, sample, timeout=0, **fixed)
    estimate = gb.profile_model(model, sample, method="estimate", rates="CPU core", **fixed)
    assert estimate.provenance["approximate"] == {}
    for one, other in zip(measured.layers, estimate.layers, strict=True):
        for peak in ("forward_peak_bytes", "backward_peak_bytes", "accumulating_peak_bytes"):
            assert getattr(other, peak) == getattr(one, peak), (one.name, peak)


class Differentiates(nn.Module):
    """Is the derivative of a function: by torch.func, or as the error says."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.by_func = by_func

    def forward(self, x: Tensor) -> Tensor:
        if self.by_func:
            return torch.func.grad(lambda y: y.pow(3).sum())(x)  # type: ignore[no-any-return]
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_the_fix_for_a_layer_that_differentiates_by_torch_func_works(method: Any) -> None:
    """Nobody can look at what such a layer saves; the error says what to write."""
    options: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False, "method": method}
    options |= {"rates": "CPU core"} if method == "estimate" else {"timeout": 0}
    for by_func in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), Differentiates(by_func), nn.Linear(4, 2))
        if by_func:
            with pytest.raises(ProfileError, match="Fix: let the layer differentiate by") as caught:
                gb.profile_model(model, torch.randn(4, 4), **options)
            assert "method='measure'" not in str(caught.value)
        else:
            assert gb.profile_model(model, torch.randn(4, 4), **options).n_layers == 3


@pytest.mark.parametrize("name", CHAINS)
def test_an_estimate_has_the_bytes_of_a_measurement(name: str) -> None:
    """Peaks of a CPU's kernels, also of what they make for nobody."""
    layers, shape, options = CHAINS[name]
    model, sample = nn.Sequential(*layers), torch.randn(shape)
    sample = sample.to(next(model.parameters()).dtype)
    fixed: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False, **options}
    measured = gb.profile_model(model, sample, timeout=0, **fixed)
    estimate = gb.profile_model(model, sample, method="estimate", rates="CPU core", **fixed)
    both: list[Any] = list(zip(measured.layers, estimate.layers, strict=True))
    if options:
        both.append((measured.step.loss, estimate.step.loss))
        both.append((measured.step.whole_loss, estimate.step.whole_loss))
    for one, other in both:
        for peak in PEAKS:
            assert getattr(other, peak) == getattr(one, peak), (one.name, peak)
        assert other.flops == one.flops


def test_how_many_rows_two_sparse_gradients_have_is_approximate() -> None:
    """Rows that are the same may be added on a CPU; where there is one gradient, nothing is."""
    options: dict[str, Any] = {"method": "estimate", "rates": "CPU core", "rows": ()}
    for n_times, flagged in ((1, set()), (2, {"1"})):
        model = nn.Sequential(nn.Linear(16, 16), Looked(n_times), nn.Tanh())
        found = gb.profile_model(model, torch.randn(8, 16), chunks=2, progress=False, **options)
        assert set(found.provenance["approximate"]) == flagged


@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_how_much_is_padding_is_approximate(kind: Any) -> None:
    """An estimate of a table with sparse gradients takes all of it for words."""
    words = torch.arange(48).view(8, 6) % 40
    words[:, 4:] = 0
    options: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False}
    options["optimizer"] = torch.optim.SparseAdam
    model = nn.Sequential(kind(40, 16, padding_idx=0, sparse=True))
    measured = gb.profile_model(model, words, timeout=0, **options)
    estimate = gb.profile_model(model, words, method="estimate", rates="CPU core", **options)
    assert "padding" in " ".join(estimate.provenance["approximate"]["0"])
    (one,), (other,) = measured.layers, estimate.layers
    for name in (*PEAKS, "optimizer_peak_bytes"):
        # Of bags there are a few other indices too.
        assert 0.9 * getattr(one, name) <= getattr(other, name) <= 2 * getattr(one, name), name
    assert one.optimizer_bytes == other.optimizer_bytes == 2 * 40 * 16 * 4
    assert estimate.step.optimizer_time is not None


class Weighted(nn.Module):
    """Adds up rows of a table, each with a weight of its own."""

    def __init__(self, n_rows: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(n_rows, 16, mode="sum", sparse=True)
        self.weights = nn.Parameter(torch.randn(8, 4))

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.bag(words, per_sample_weights=self.weights)
        return found


TABLES: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda n: nn.Embedding(n, 16, sparse=True),
    "norm": lambda n: nn.Embedding(n, 16, max_norm=1.0, sparse=True),
    "mean": lambda n: nn.EmbeddingBag(n, 16, sparse=True),
    "max": lambda n: nn.EmbeddingBag(n, 16, mode="max"),
    "weighted": Weighted,
}


@pytest.mark.parametrize("name", TABLES)
def test_looking_up_a_table_does_not_read_all_of_it(name: str) -> None:
    """What it costs depends on what is looked up; a dense gradient is of the whole table."""
    rates = gb.DeviceRates("plain", {"float32": 1e30}, 1e6, launch_time=0.0, host_time=None)
    words, found = torch.zeros(8, 4, dtype=torch.long), []
    for n_rows in (1_000, 1_000_000):
        with torch.device("meta"):
            model = nn.Sequential(TABLES[name](n_rows))
        options: dict[str, Any] = {"method": "estimate", "rates": rates, "rows": ()}
        found.append(gb.profile_model(model, words, progress=False, **options).layers[0])
    few, many = found
    row = 4 * 16
    for time in ("forward_time", "no_grad_forward_time"):
        assert getattr(many, time) == getattr(few, time)
        assert 8 * 4 * row / 1e6 <= getattr(few, time) <= 8 * (4 * 4 * row + 64) / 1e6
    if name != "max":
        assert many.backward_time == few.backward_time


def test_layers_that_were_tied_since_do_not_match() -> None:
    """Nor do layers that were tied when they were profiled, and are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    options: dict[str, Any] = {"chunks": 2, "rows": (), "timeout": 0, "progress": False}
    untied = gb.profile_model(model, torch.randn(4, 4), **options)
    assert untied.matches(model)
    model[2].weight = model[0].weight
    assert not untied.matches(model) and untied.matches(model).tied == ("0", "2")
    assert "layer '2' is tied otherwise" in str(untied.matches(model))
    tied = gb.profile_model(model, torch.randn(4, 4), **options)
    assert tied.matches(model)
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    assert tied.matches(model).tied == ("0", "2")


class KeepsTwo(torch.autograd.Function):
    """Keeps two tensors as attributes, of which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.large, ctx.small = x.exp(), x[:, :2].exp()
        return x * ctx.large

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.large


class Kept(nn.Module):
    """Runs such a function."""

    def forward(self, x: Tensor) -> Tensor:
        return KeepsTwo.apply(x)


def test_estimates_of_one_model_are_equal() -> None:
    """Storages are numbered in the order in which they are made, wherever they lie."""
    model = nn.Sequential(nn.Linear(8, 8), *(Kept() for _ in range(3)), nn.Linear(8, 8))
    sample, found, in_between = torch.rand(4, 8), [], []
    for n in range(6):
        profile = gb.profile_model(model, sample, method="estimate", rows=(), progress=False)
        found.append((profile.layers, profile.storages))
        in_between.append([torch.empty(64, device="meta") for _ in range(7 * n)])
    assert found == found[:1] * 6
    saved = [profile.storages[key] for key in profile.layers[1].saved]
    assert 4 * 8 * 4 in saved and 4 * 2 * 4 in saved
