"""Random numbers where several parties draw: threads, generators of layers, pipelines in layers."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe, is_recomputing
from gpipebal.pipeline.randomness import random_ops, randomness
from gpipebal.pipeline.randomness.randomness import OwnRandomness
from gpipebal.pipeline.randomness.seeds import draw_seed
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(120)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Noise(nn.Module):
    """Multiply by a weight and by random numbers, so that the weight's gradient tells them."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.double))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.draw(x)


def gradient_is_right(noise: Noise, pipe: GPipe) -> bool:
    """Run a step over ones; the gradient of the weight must be the sum of the output."""
    noise.weight.grad = None
    output = pipe(torch.ones(4, 3, dtype=torch.double))
    output.sum().backward()
    assert noise.weight.grad is not None
    return torch.allclose(noise.weight.grad, output.detach().sum(0))


@pytest.fixture
def often() -> Iterator[None]:
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_seeds_are_not_drawn_from_a_lent_state() -> None:
    """While the default generator has a layer's state nobody takes a mini-batch's seed from it."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(_x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(30)
        return torch.zeros(1)

    library = torch.library.Library("gpipebal_test", "FRAGMENT")
    library.define("waits(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("waits", wait, "CPU")
    random_ops.prepare()
    torch.manual_seed(5)
    expected = draw_seed()
    torch.manual_seed(5)

    def run() -> None:
        with OwnRandomness(1, 0).watching():
            torch.ops.gpipebal_test.waits(torch.zeros(1))

    seeds: list[int] = []
    lender = threading.Thread(target=run)
    lender.start()
    assert inside.wait(30)
    drawer = threading.Thread(target=lambda: seeds.append(draw_seed()))
    drawer.start()
    drawer.join(0.2)
    assert seeds == []
    go_on.set()
    drawer.join()
    lender.join()
    assert seeds == [expected]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randint": lambda x: torch.randint(1, 9, x.shape).to(x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randperm": lambda x: torch.randperm(x.numel()).view_as(x).to(x.dtype),
    "out": lambda x: torch.rand(x.shape, dtype=x.dtype, out=torch.empty_like(x)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "poisson": torch.poisson,
    "dropout": nn.functional.dropout,
}


@pytest.mark.parametrize("name", KINDS)
def test_no_operation_borrows_the_default_generator_without_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All random operations of a CPU draw from a generator of ours, given as an argument."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the default generator is lent")

    monkeypatch.setattr(randomness, "run_with_default", refuse)
    noise = Noise(KINDS[name])
    pipe = GPipe(nn.Sequential(nn.Identity(), noise), [1, 1], chunks=2, checkpoint="always")
    torch.manual_seed(1)
    assert gradient_is_right(noise, pipe)


def test_another_thread_that_draws_does_no_harm(often: None) -> None:
    """A background thread with torch's default generator changes no recompute's numbers."""
    noise = Noise(KINDS["rand"])
    pipe = GPipe(nn.Sequential(nn.Identity(), noise), [1, 1], chunks=4, checkpoint="always")
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(3)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        assert all(gradient_is_right(noise, pipe) for _ in range(30))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["rand", "native_dropout", "dropout"])
def test_generators_given_by_argument_give_torchs_own_numbers(name: str) -> None:
    """A draw equals that of the plain operation under the seed of its layer and micro-batch."""
    x = torch.ones(40, dtype=torch.double)
    with OwnRandomness(3, 2).watching():
        drawn = KINDS[name](x)
    torch.manual_seed(randomness.cell_seed(3, 0, 2))
    torch.testing.assert_close(drawn, KINDS[name](x))


@MODES
@pytest.mark.parametrize("how", ["keyword", "position", "reseeded", "default"])
def test_generators_of_layers(checkpoint: CheckpointMode, how: str) -> None:
    """A recompute draws again what its forward drew from a generator that the layer has."""
    own = torch.default_generator if how == "default" else torch.Generator()

    def draw(x: Tensor) -> Tensor:
        if how == "position":
            return torch.poisson(x * 9, own) + torch.poisson(x * 5, own)
        if how == "reseeded":
            own.manual_seed(5)
            first = torch.rand(x.shape, generator=own)
            own.manual_seed(6)
            return first + torch.rand(x.shape, generator=own)
        return torch.rand(x.shape, generator=own) * torch.randn(x.shape, generator=own)

    noise = Noise(draw)
    pipe = GPipe(nn.Sequential(nn.Identity(), noise), [1, 1], chunks=2, checkpoint=checkpoint)
    assert all(gradient_is_right(noise, pipe) for _ in range(2))


def test_a_recompute_leaves_the_layers_generator_alone() -> None:
    """The generator of a layer stands after a step where it stands without checkpoints."""
    states = []
    for checkpoint in CHECKPOINT_MODES:
        own = torch.Generator().manual_seed(1)
        noise = Noise(lambda x, own=own: torch.rand(x.shape, generator=own))  # type: ignore[misc]
        pipe = GPipe(nn.Sequential(nn.Identity(), noise), [1, 1], chunks=2, checkpoint=checkpoint)
        output = pipe(torch.ones(4, 3, dtype=torch.double))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
        torch.testing.assert_close(noise.weight.grad, 2 * output.detach().sum(0))
        states.append(own.get_state())
    assert all(torch.equal(states[0], other) for other in states)


def test_generators_drawn_from_otherwise_are_refused() -> None:
    """A layer that draws more from its generator in the recompute raises."""
    own = torch.Generator()

    def draw(x: Tensor) -> Tensor:
        more = torch.rand(x.shape, generator=own) if is_recomputing() else 0
        return torch.rand(x.shape, generator=own) + more

    pipe = GPipe(nn.Sequential(nn.Identity(), Noise(draw)), [1, 1], checkpoint="always")
    with pytest.raises(ModelError, match=r"draws from a torch.Generator of its own otherwise"):
        pipe(torch.ones(4, 3)).sum().backward()


@MODES
def test_dropout_in_a_pipeline_inside_a_layer(checkpoint: CheckpointMode) -> None:
    """An inner pipeline draws the same when the outer one's layer is recomputed."""
    noise = Noise(KINDS["rand"])
    inner = GPipe(nn.Sequential(noise, nn.Dropout(0.5)), [1, 1], chunks=2)
    outer = GPipe(nn.Sequential(nn.Identity(), inner), [1, 1], chunks=2, checkpoint=checkpoint)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        assert gradient_is_right(noise, outer)
        results.append(noise.weight.grad)
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0], results[2])  # type: ignore[arg-type]


@MODES
def test_a_torch_without_the_key(checkpoint: CheckpointMode, monkeypatch: Any) -> None:
    """Where torch has not got the dispatch key a mode in Python gives the same numbers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.5))
    found = []
    for catchers in (random_ops._catchers, [None]):
        monkeypatch.setattr(random_ops, "_catchers", catchers)
        mine = copy.deepcopy(model)
        pipe = GPipe(mine, [2, 2], chunks=2, checkpoint=checkpoint)
        torch.manual_seed(4)
        pipe(torch.ones(4, 3)).sum().backward()
        found.append([parameter.grad for parameter in mine.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_a_mapped_layer_is_the_first_to_draw() -> None:
    """The seed of the mini-batch is not mapped; the layer's numbers are as it asks for."""

    def mapped(x: Tensor, randomness: str) -> Tensor:
        result: Tensor = torch.func.vmap(torch.rand_like, randomness=randomness)(x)
        return result

    pipe = GPipe(nn.Sequential(Noise(lambda x: mapped(x, "different"))), [1], chunks=2)
    rows = pipe(torch.ones(4, 3, dtype=torch.double)).unique(dim=0)
    assert len(rows) == 4
    same = GPipe(nn.Sequential(Noise(lambda x: mapped(x, "same"))), [1], chunks=2)
    assert len(same(torch.ones(4, 3, dtype=torch.double)).unique(dim=0)) == 2


@MODES
def test_the_default_generator_by_name(checkpoint: CheckpointMode) -> None:
    """Who names torch's default generator draws as who names none: by no clock."""
    layers = [Noise(lambda x: torch.rand(x.shape, generator=torch.default_generator)) for _ in "ab"]
    pipe = GPipe(nn.Sequential(*layers), [1, 1], chunks=4, checkpoint=checkpoint)
    found = []
    for _ in range(5):
        torch.manual_seed(3)
        found.append(pipe(torch.ones(4, 3, dtype=torch.double)))
        assert torch.equal(found[0], found[-1])
    noise = Noise(lambda x: torch.rand(x.shape, generator=torch.default_generator))
    assert gradient_is_right(noise, GPipe(nn.Sequential(noise), [1], checkpoint=checkpoint))


@pytest.mark.parametrize("catchers", [random_ops._catchers, [None]], ids=["key", "mode"])
def test_what_is_traced_draws_nothing(catchers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's backend traces random operations in a worker, and finds them as they are."""
    random_ops.prepare()
    monkeypatch.setattr(random_ops, "_catchers", catchers)
    own = OwnRandomness(0, 0)
    with own.watching():
        graph = make_fx(torch.rand_like)(torch.ones(3)).graph
        with FakeTensorMode():
            assert torch.rand(3).shape == (3,)
        drawn = torch.rand(3)
    (node,) = [node for node in graph.nodes if node.op == "call_function"]
    assert node.target is torch.ops.aten.rand_like.default
    with OwnRandomness(0, 0).watching():
        assert torch.equal(drawn, torch.rand(3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_on_cuda_is_torchs_own() -> None:
    """Dropout on CUDA draws torch's numbers, without the default generator, and differentiates."""
    x = torch.ones(400, device="cuda", requires_grad=True)
    before = torch.cuda.get_rng_state()
    with OwnRandomness(3, 2).watching():
        drawn, mask = torch.native_dropout(x, 0.25, True)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.cuda.manual_seed(randomness.cell_seed(3, 0, 2))
    expected, kept = torch.native_dropout(x, 0.25, True)
    assert mask.dtype == kept.dtype
    assert torch.equal(mask, kept)
    torch.testing.assert_close(drawn, expected)
    (mine,) = torch.autograd.grad(drawn.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(mine, theirs)


class Recurrent(nn.Module):
    """A recurrent layer with dropout between its two parts, which hands on its outputs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(4, 4, num_layers=2, dropout=0.5, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("out_of_sight", [False, True])
def test_recurrent_layers_with_dropout_draw_the_same_again(
    kind: type[nn.RNNBase], out_of_sight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any mode and balance; also where the operation draws as a whole, as cuDNN's does."""
    monkeypatch.setattr(random_ops, "_draws_out_of_sight", lambda args: out_of_sight)
    torch.manual_seed(0)
    model = nn.Sequential(Recurrent(kind), Recurrent(kind))
    inputs = torch.randn(4, 3, 4, dtype=torch.double)
    found = []
    settings: list[tuple[list[int], CheckpointMode]] = [([1, 1], "never"), ([1, 1], "always")]
    for balance, checkpoint in (*settings, ([2], "always")):
        devices = ["cpu"] * len(balance)
        pipe = GPipe(model, balance, devices=devices, chunks=2, checkpoint=checkpoint)
        model.zero_grad()
        torch.manual_seed(1)
        output = pipe(inputs)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in model.parameters())])
        # Every micro-batch, and both layers, have masks of their own.
        torch.manual_seed(2)
        assert not torch.equal(pipe(inputs), output)
        pipe.close()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_recurrent_operation_that_draws_as_a_whole_borrows_the_default_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state is the layer's while the operation runs, and the caller's again afterwards."""
    seen: list[tuple[str, int]] = []
    run = randomness.run_with_default

    def note(generator: torch.Generator, operation: Any, args: Any, kwargs: Any) -> Any:
        seen.append((operation.name(), generator.initial_seed()))
        return run(generator, operation, args, kwargs)

    monkeypatch.setattr(randomness, "run_with_default", note)
    monkeypatch.setattr(random_ops, "_draws_out_of_sight", lambda args: True)
    layer = Recurrent(nn.LSTM)
    inputs = torch.randn(2, 3, 4, dtype=torch.double)
    before = torch.get_rng_state()
    with OwnRandomness(7, 0).watching():
        one = layer(inputs)
    with OwnRandomness(7, 0).watching():
        torch.testing.assert_close(layer(inputs), one)
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, _ in seen] == ["aten::lstm.input"] * 2 and len(set(seen)) == 1
    layer.eval()
    with OwnRandomness(7, 0).watching():
        layer(inputs)  # nothing is drawn
    assert len(seen) == 2


_ELSEWHERE = """
import torch
from torch.overrides import TorchFunctionMode
from gpipebal.pipeline.randomness import random_ops

class Elsewhere(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.empty and "device" not in (kwargs or {}):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return function(*args, **(kwargs or {}))

with Elsewhere():
    random_ops.prepare()
assert random_ops._catchers[0] is not None
"""


def test_the_programs_default_device_does_not_matter() -> None:
    """What random operations are caught with is made on the host, which they can do everywhere."""
    # In a process of its own: operations are caught once for all. Refused as on CUDA, where a
    # generator of the host cannot fill a tensor of the default device.
    subprocess.run([sys.executable, "-c", _ELSEWHERE], check=True, timeout=100)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_may_make_its_generator_anew(checkpoint: CheckpointMode) -> None:
    """It draws the same in every pass, and the recompute finds that it does."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(5)
            scale = torch.rand(x.shape, generator=generator)
            return self.linear(x * scale + torch.rand(x.shape, generator=generator))

    plain = nn.Sequential(Noise())
    model = copy.deepcopy(plain)
    inputs = torch.randn(4, 3)
    run_plain(plain, inputs, 2).square().sum().backward()
    GPipe(model, [1], chunks=2, checkpoint=checkpoint)(inputs).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_generator_made_anew_and_seeded_otherwise_is_refused() -> None:
    """A recompute would draw other numbers than its forward."""
    seeds = itertools.count()

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(next(seeds))
            return self.linear(x * torch.rand(x.shape, generator=generator))

    pipe = GPipe(nn.Sequential(Noise()), [1], chunks=2, checkpoint="always")
    with pytest.raises(ModelError, match="otherwise than in its forward"):
        pipe(torch.randn(4, 3)).sum().backward()
