"""Costs of layers, losses and optimizers that are rarely seen, and arguments that are mistakes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler

import gpipebal as gb
from gpipebal.errors import BalanceError, DeviceError, ProfileError, UsageError
from gpipebal.models import resnet
from gpipebal.profiler.replicas.identity import identity_of
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import optimizer_needs

pytestmark = pytest.mark.timeout(120)

#: Ways to take a profile.
WAYS: tuple[dict[str, Any], ...] = (
    {"timeout": 0.0, "as_pipeline": False, "partitions": 1},
    {"method": "estimate", "rates": "CPU core"},
)


def profiled(model: nn.Module, sample: Any, way: dict[str, Any], **options: Any) -> gb.Profile:
    """Take a profile of two micro-batches in the shortest way."""
    given = {"chunks": 2, "rows": (), "progress": False}
    return gb.profile_model(model, sample, **(given | way | options))


class Does(nn.Module):
    """Do something that is given as a function."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        """Call the function."""
        return self.function(x, *self.parts)


# --- optimizers ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_hides_no_costs_of_an_optimizer(name: str, way: dict[str, Any]) -> None:
    """Schedulers put a step of their own into the optimizer."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    SCHEDULERS[name](optimizer)
    found = profiled(model, torch.ones(4, 8), way, optimizer=optimizer)
    assert [layer.optimizer_bytes for layer in found.layers] == [2 * 36 * 4 + 8, 0]
    assert found.step.optimizer_time is not None


def test_groups_follow_their_own_members() -> None:
    """Weights and biases take turns in a model, and are stepped group by group."""
    parameters = [nn.Parameter(torch.zeros(10, 10) if k % 2 else torch.zeros(10)) for k in range(4)]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    found = optimizer_needs(Maker(torch.optim.AdamW(groups), parameters), "cpu")
    assert (found.left, found.before) == ([0, 0, 40, 400], [None, None, 0, 1])


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_cannot_be_made_is_an_error(way: dict[str, Any]) -> None:
    """What its constructor says is said, and not that it cannot be stepped."""
    make: Any = partial(torch.optim.Adam, learning_rate=1e-3)
    with pytest.raises(ProfileError, match=r"cannot be made: TypeError: .*learning_rate"):
        profiled(nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4), way, optimizer=make)


def test_an_optimizer_that_reads_values_when_it_is_made() -> None:
    """Stand-ins with values are tried, too."""

    class Reads(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            parameters = list(parameters)
            self.start = [float(p.sum()) for p in parameters]
            super().__init__(parameters, lr=0.1, momentum=0.9)

    model = nn.Sequential(nn.Linear(4, 4))
    found = profiled(model, torch.ones(4, 4), WAYS[0], optimizer=Reads)
    assert found.layers[0].optimizer_bytes == 80


class Own(torch.optim.Optimizer):
    """An optimizer with attributes of its own: numbers, a list, its parameters, and a lock."""

    def __init__(self, parameters: Any, decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.decay, self.log = decay, [0]
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along a mean of the gradients."""
        with self.lock:
            self.log.append(1)
        for p in self.all:
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - self.decay).sub_(mean.lerp_(p.grad, 0.1))


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizers_own_attributes_are_copied(way: dict[str, Any]) -> None:
    """With stand-ins in the place of the parameters; those of the caller are left alone."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = Own(model.parameters())
    before = model[0].weight.detach().clone()
    found = profiled(model, torch.ones(4, 4), way, optimizer=optimizer)
    assert found.layers[0].optimizer_bytes == 80 and found.step.optimizer_time is not None
    assert optimizer.log == [0] and not optimizer.state
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("make", "together"),
    [
        (torch.optim.Adam, True),
        (torch.optim.Adafactor, False),
        (partial(torch.optim.Adafactor, foreach=True), True),
        (partial(torch.optim.Adam, lr=torch.tensor(1e-3)), False),
        (partial(torch.optim.Adam, lr=torch.tensor(1e-3), capturable=True), True),
    ],
)
def test_who_steps_all_at_once_on_cuda(make: Any, together: bool) -> None:
    """As torch's optimizers choose it where they are not told."""
    maker = Maker(make, [nn.Parameter(torch.zeros(10)) for _ in range(2)])
    assert optimizer_needs(maker, "cuda").together == together


# --- what is reached past layers ------------------------------------------------------------------


class Criterion(nn.Module):
    """A loss with buffers, that is not called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def loss(self, output: Tensor) -> Tensor:
        """Normalise, and sum up."""
        return self.norm(output).square().sum()


class Holder:
    """A loss that is an object."""

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    def __call__(self, output: Tensor) -> Tensor:
        """Call the criterion."""
        return self.criterion.loss(output)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: c.loss,
        lambda c: partial(c.loss),
        Holder,
        lambda c: partial(lambda y, c: c.loss(y), c=c),
    ],
)
def test_buffers_behind_a_loss_are_left_alone(wrap: Callable[[Criterion], Any]) -> None:
    """Whichever way the loss holds the module."""
    criterion = Criterion()
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    profiled(nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4), WAYS[0], loss_fn=wrap(criterion))
    for name, value in criterion.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert criterion.norm.weight.grad is None


@pytest.mark.parametrize("how", ["function", "list"])
def test_weights_of_others_are_no_activations(how: str) -> None:
    """They are there once, however many micro-batches there are; and the profile says so."""
    body = nn.Linear(8, 100)

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = [body]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.tied[0].weight.T)

    head = Listed() if how == "list" else Does(lambda x: F.linear(x, body.weight.T))
    found = profiled(nn.Sequential(body, head), torch.ones(4, 8), WAYS[0])
    assert found.bytes_of(found.layers[1].saved) == 2 * 100 * 4
    assert any("does not register" in flag for flag in found.provenance["flags"])


class Uses(nn.Module):
    """A layer that has a weight in a list, which registers nothing."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.others = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0])


def test_a_weight_belongs_to_the_layer_that_registers_it() -> None:
    """Also where an earlier layer has it in a list, and where two register it."""
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    alone = nn.Sequential(Uses(one.weight), nn.ReLU(), one)
    other.weight = one.weight
    tied = nn.Sequential(Uses(one.weight), one, other)
    for model, place in ((alone, 2), (tied, 1)):
        found = profiled(model, torch.randn(8, 4), WAYS[0], optimizer=torch.optim.Adam)
        for k, layer in enumerate(found.layers):
            assert layer.parameter_bytes == 64 * (k == place)
            assert layer.buffer_bytes == 0
            assert (layer.optimizer_bytes or 0) >= 128 * (k == place)
        assert [tie.layers for tie in found.ties] == ([(1, 2)] if model is tied else [])
        assert any("does not register" in flag for flag in found.provenance["flags"])


def test_what_is_saved_on_another_device_is_not_this_ones() -> None:
    """The meta device stands for where activations are offloaded to."""

    class Offload(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.to("meta"))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    model = nn.Sequential(nn.Linear(8, 8), Does(Offload.apply))
    found = profiled(model, torch.ones(4, 8), WAYS[0])
    assert found.layers[1].saved == ()


# --- attention ------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with eight heads of queries, and fewer of keys."""

    def __init__(self, heads: int = 8, *, plain: bool = False) -> None:
        super().__init__()
        self.query, self.heads, self.plain = nn.Linear(64, 64), heads, plain
        self.key = nn.Linear(64, 8 * heads)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        query = self.query(x).unflatten(-1, (8, 8)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        kernels = [SDPBackend.MATH] if self.plain else list(SDPBackend.__members__.values())[1:4]
        with sdpa_kernel(kernels):
            y = F.scaled_dot_product_attention(query, key, key, enable_gqa=self.heads < 8)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("layer", [Attention(2), Attention(3 - 2), Attention(plain=True)])
def test_attention_of_grouped_heads_and_by_products(layer: Attention) -> None:
    """Estimates keep what a CPU keeps."""
    sample = torch.randn(4, 32, 64)
    real, estimated = (profiled(nn.Sequential(layer), sample, way) for way in WAYS)
    if estimated.provenance["approximate"]:
        pytest.skip("this torch's choice of a kernel is not known")
    for name in ("saved", "forward_peak_bytes", "backward_peak_bytes", "flops"):
        assert getattr(estimated.layers[0], name) == getattr(real.layers[0], name), name
    assert estimated.storages == real.storages


def test_flash_attention_takes_grouped_heads_on_cuda() -> None:
    """No matrix of weights is kept."""
    with torch.device("meta"):
        model = nn.Sequential(Attention(2)).bfloat16()
        sample = torch.empty(2, 1024, 64, dtype=torch.bfloat16)
    found = profiled(model, sample, {"method": "estimate", "rates": "H100"})
    assert found.bytes_of(found.layers[0].saved) < 1024 * 1024


@pytest.mark.parametrize("way", WAYS)
def test_operations_of_attention_in_evaluation_mode(way: dict[str, Any]) -> None:
    """The fast path is one operation without a formula; what it keeps is not told by shapes."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, sample = nn.Sequential(nn.Linear(16, 16), layer), torch.randn(4, 8, 16)
    trained = profiled(model, sample, way).layers[1].flops
    assert trained
    layer.eval()
    found = profiled(model, sample, way)
    assert found.layers[1].flops == trained
    assert torch.backends.mha.get_fastpath_enabled()
    if "method" in way:
        assert "fast path" in found.provenance["approximate"]["1"][0]


def test_a_loss_in_evaluation_mode_has_a_fast_path_too() -> None:
    """What it needs without a graph is not told by shapes either."""

    class Encoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.inner(output) - target).square().mean()

    sample, loss = torch.randn(4, 8, 16), Encoded().eval()
    given: dict[str, Any] = {"method": "estimate", "rates": "CPU core"}
    found = profiled(nn.Sequential(nn.Linear(16, 16)), sample, given, loss_fn=loss, target=sample)
    assert "fast path" in " ".join(found.provenance["approximate"]["loss"])


# --- layers ---------------------------------------------------------------------------------------


def test_a_lazy_model_matches_by_name() -> None:
    """Nothing can be said of layers without shapes, but that they are there."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))

    model, sample = build(), torch.ones(8, 4)
    model(sample)
    profile = profiled(model, sample, WAYS[0], threads=1)
    match = gb.match_profile(profile, build())
    assert match and match.unknown == ("0", "2")
    plan = gb.solve(profile, 2)
    pipe = gb.GPipe.from_plan(build(), plan, devices=["cpu"] * 2, threads_per_partition=1)
    assert pipe(sample).shape == (8, 2)


@pytest.mark.parametrize("way", WAYS)
def test_lazy_buffers_are_refused(way: dict[str, Any]) -> None:
    """As lazy parameters are."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(affine=False))
    with pytest.raises(ProfileError, match=r"^layer '1' has no shapes .*\nFix: run model"):
        profiled(model, torch.ones(4, 3, 8, 8), way)


@pytest.mark.parametrize("way", WAYS)
def test_a_lazy_loss_is_refused(way: dict[str, Any]) -> None:
    """As lazy layers are."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(1)

        def forward(self, output: Tensor) -> Tensor:
            return self.head(output).sum()

    with pytest.raises(ProfileError, match=r"^layer 'loss' has no shapes .*\nFix: run model"):
        profiled(nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4), way, loss_fn=Loss())


class Clamped(nn.Parameter):
    """A parameter of a class of its own."""

    def clamped(self) -> Tensor:
        """Return the values within a range."""
        return self.clamp(-1, 1)


class Special(nn.Module):
    """Read an attribute of a parameter, and of a buffer, and call a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.plain = Clamped(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))
        for tensor in (self.weight, self.plain, self.table):
            tensor.scale = 0.5  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Use them all."""
        weight, plain, table = (x * x.scale for x in (self.weight, self.plain, self.table))  # type: ignore[union-attr]
        return x @ self.weight.clamped() @ weight + plain * table


@pytest.mark.parametrize("way", WAYS)
def test_parameters_keep_their_class_and_attributes(way: dict[str, Any]) -> None:
    """In the copies that are measured."""
    model = nn.Sequential(Special())
    assert profiled(model, torch.ones(4, 4), way).layers[0].parameter_bytes == 80


@pytest.mark.parametrize("way", WAYS)
def test_a_first_layer_that_differentiates_by_its_input(way: dict[str, Any]) -> None:
    """The fix is one that works."""

    def slope(x: Tensor, net: nn.Module) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]

    sample = torch.ones(8, 2, requires_grad=True)
    with pytest.raises(ProfileError, match=r"x = x\.detach\(\)\.requires_grad_\(\)"):
        profiled(nn.Sequential(Does(slope, nn.Linear(2, 2))), sample, way)
    mended = Does(lambda x, net: slope(x.detach().requires_grad_(), net), nn.Linear(2, 2))
    profiled(nn.Sequential(mended), sample, way)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layers_with_compressed_buffers_are_told_apart() -> None:
    """Such tensors have no strides, and their elements decide what they cost."""

    class Mixes(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            table = torch.diag((torch.arange(4) < n).float())
            self.register_buffer("table", table.to_sparse_csr())

        def forward(self, x: Tensor) -> Tensor:
            return (self.table @ x.T).T

    assert identity_of(Mixes(2)) == identity_of(Mixes(2)) != identity_of(Mixes(3))
    model = nn.Sequential(nn.Linear(4, 4), Mixes(3))
    profiled(model, torch.ones(4, 4), WAYS[0], share_identical=True)


class Doubled(nn.Parameter):
    """A weight that is used in double precision."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, _ = args
        with torch._C.DisableTorchFunctionSubclass():
            return func(x.double(), weight.double()).float()


@pytest.mark.parametrize("way", [{"share_identical": True}, {"method": "estimate"}])
def test_layers_with_weights_of_other_classes_are_told_apart(way: dict[str, Any]) -> None:
    """The class of a parameter decides what runs, and so does that of the tensors in it."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model[2].weight = Tensor._make_subclass(Doubled, model[2].weight.detach(), True)  # type: ignore[arg-type]
    options = way if "method" in way else {"timeout": 0, **way}
    found = gb.profile_model(model, torch.ones(6, 4), rows=(), progress=False, **options)
    before, doubled, last = (layer.forward_peak_bytes for layer in found.layers[1:])
    assert (before, last) == (6 * 4 * 4, 6 * 4 * 4)
    assert doubled > 2 * before


# --- sizes, failures and arguments ----------------------------------------------------------------


def test_one_size_scales_no_buffers_and_no_gradients() -> None:
    """They are as large for every micro-batch."""
    model, sample = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512)), torch.ones(16, 8)
    found = profiled(model, sample, WAYS[0]).at_rows(2)
    true = profiled(model, sample, WAYS[0], chunks=8)
    for name in ("buffer_bytes", "kept_buffer_bytes", "saved_buffer_bytes"):
        assert [getattr(x, name) for x in found.layers] == [getattr(x, name) for x in true.layers]
    near = true.layers[0].backward_peak_bytes
    assert found.layers[0].backward_peak_bytes == pytest.approx(near, rel=0.02)


def test_a_cpu_without_memory_gets_advice_on_memory() -> None:
    """And not to do what is done already."""
    model = nn.Sequential(nn.Linear(4, 4), Does(lambda x: x + torch.empty(2**50)[0]))
    for alone, advised in ((None, True), (True, False)):
        with pytest.raises(ProfileError, match="with more chunks") as caught:
            profiled(model, torch.ones(8, 4), WAYS[0], one_at_a_time=alone)
        assert ("one_at_a_time=True" in str(caught.value)) == advised


def test_numbers_of_numpy_are_numbers() -> None:
    """In rows and in rates."""
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.ones(8, 4)
    found = profiled(model, sample, WAYS[0], rows=np.int64(2))
    assert [size.rows for size in found.other_sizes] == [2]
    rates = gb.DeviceRates("x", {"float32": np.float32(1e12)}, np.float32(1e12))  # type: ignore[dict-item, arg-type]
    assert type(rates.bandwidth) is type(rates.flops_of("float32")) is float
    assert profiled(model, sample, {"method": "estimate", "rates": rates}).layers[0].time > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops": {"float32": "1e12"}},
        {"flops": {"float32": 1e12, torch.bfloat16: 1e13}},
        {"bandwidth": "1e12"},
        {"launch_time": None},
    ],
)
def test_rates_that_are_no_numbers_are_refused(wrong: dict[str, Any]) -> None:
    """With a fix."""
    with pytest.raises(DeviceError, match="Fix: "):
        gb.DeviceRates(**({"name": "x", "flops": {"float32": 1e12}, "bandwidth": 1e12} | wrong))


@pytest.mark.parametrize("costs", [{0: 5.0, 1: 1.0}, {5.0, 1.0}, torch.tensor(3.0), np.array(3.0)])
def test_costs_without_an_order_are_refused(costs: Any) -> None:
    """A dictionary would be read as its keys."""
    with pytest.raises(BalanceError, match="costs are not a list"):
        gb.balance_cost(costs, 2)


@pytest.mark.parametrize(
    "wrong", [{"blocks": ()}, {"blocks": (1, 0)}, {"width": 0}, {"num_classes": 0}]
)
def test_a_resnet_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """With a fix."""
    with pytest.raises(UsageError, match="Fix: "):
        resnet(**({"blocks": (1,), "num_classes": 2, "width": 2} | wrong))
