"""Skip connections through a pipeline: routed straight, right in every mode, and freed."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from chains import run_plain
from hypothesis import given, settings
from hypothesis import strategies as st
from skip_layers import give, keep
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.profiler import profile_model
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode
from gpipebal.skip import Namespace, pop, skippable, stash

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Layer(nn.Module):
    """A linear layer that stashes an image of its input and adds what it pops."""

    def __init__(self, n_stashes: int = 0, n_pops: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        for key in sorted(self.pops()):  # type: ignore[operator]
            x = x + (yield pop(key[1])).sin()
        x = self.linear(x).tanh()
        for key in sorted(self.stashes()):  # type: ignore[operator]
            yield stash(key[1], x * 2)
        return x


def layer(stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    """Make a layer that stashes and pops these names."""
    return skippable(stash=stashes, pop=pops)(Layer)()


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Sequential, list[int]]:
    """A random chain with random skips, some of them nested in a Sequential, and a balance."""
    n_layers = draw(st.integers(1, 6))
    stashes: list[list[str]] = [[] for _ in range(n_layers)]
    pops: list[list[str]] = [[] for _ in range(n_layers)]
    for k in range(draw(st.integers(0, 5))):
        source = draw(st.integers(0, n_layers - 1))
        destination = draw(st.integers(0, n_layers - 1))
        if source < destination:
            stashes[source].append(f"skip{k}")
            pops[destination].append(f"skip{k}")
    layers = [layer(tuple(a), tuple(b)) for a, b in zip(stashes, pops, strict=True)]
    chain: list[nn.Module] = []
    while layers:
        size = draw(st.integers(1, len(layers)))
        part, layers = layers[:size], layers[size:]
        chain.append(nn.Sequential(*part) if draw(st.booleans()) else part[0])
        if chain[-1] is part[0]:
            layers = part[1:] + layers
    cuts = sorted(draw(st.sets(st.integers(1, len(chain) - 1)))) if len(chain) > 1 else []
    bounds = [0, *cuts, len(chain)]
    return nn.Sequential(*chain), [b - a for a, b in itertools.pairwise(bounds)]


@given(
    chains(),
    st.integers(1, 4),
    st.sampled_from(CHECKPOINT_MODES),
    st.sampled_from([None, "gpipe", "1f1b"]),
)
@settings(deadline=None, max_examples=60)
def test_any_skips_through_any_balance(
    chain: tuple[nn.Sequential, list[int]],
    chunks: int,
    checkpoint: CheckpointMode,
    schedule: str | None,
) -> None:
    """Outputs and gradients are the plain model's, whatever layers skip past whatever cuts."""
    plain, balance = chain
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=chunks, checkpoint=checkpoint)
    torch.manual_seed(0)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    mine, theirs = (inputs.clone().requires_grad_() for _ in range(2))
    output = run_plain(plain, theirs, chunks)
    output.square().sum().backward()
    if schedule is None:
        found = pipe(mine)
        torch.testing.assert_close(found, output)
        found.square().sum().backward()
    else:
        pipe.step(mine, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule)
    pipe.close()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for left, right in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


@skippable(stash=["a", "b", "c", "d", "e"])
class StashAll(nn.Module):
    """Stash a tensor, an integer tensor, a tuple, a number and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        image = self.linear(x)
        yield stash("a", image)
        yield stash("b", torch.arange(3))
        yield stash("c", (image * 2, {"t": image.detach()}))
        yield stash("d", 7)
        yield stash("e", None)
        return image.tanh()


@skippable(pop=["a", "b", "c", "d", "e"])
class PopAll(nn.Module):
    """Use some of what is popped, detach some, ignore some."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: Tensor) -> Any:
        image = yield pop("a")
        whole = yield pop("b")
        pair = yield pop("c")
        number = yield pop("d")
        nothing = yield pop("e")
        assert nothing is None
        assert whole.tolist() == [0, 1, 2]
        assert not pair[1]["t"].requires_grad
        if self.used == "all":
            return x * image + pair[0] * number + whole
        return x + image.detach() if self.used == "detached" else x


@MODES
@pytest.mark.parametrize("used", ["all", "detached", "none"])
def test_values_of_any_kind_across_partitions(checkpoint: CheckpointMode, used: str) -> None:
    """Integers, None, nested tuples, unused and detached skips: the plain model's gradients."""
    torch.manual_seed(0)
    middle = nn.Linear(3, 3, dtype=torch.float64)
    plain = nn.Sequential(StashAll(), middle, PopAll(used))
    inputs = torch.randn(4, 3, dtype=torch.float64)
    for balance in ([3], [1, 2], [1, 1, 1]):
        pipe = GPipe(copy.deepcopy(plain), balance, chunks=2, checkpoint=checkpoint)
        plain.zero_grad()
        run_plain(plain, inputs, 2).sum().backward()
        pipe(inputs).sum().backward()
        for left, right in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad)


def test_a_skip_does_not_pass_through_partitions_in_between() -> None:
    """A partition between source and destination holds nothing of it."""
    first, last = layer(stashes=("far",)), layer(pops=("far",))
    pipe = GPipe(
        nn.Sequential(first, nn.Identity(), nn.Identity(), last), [1, 1, 1, 1], checkpoint="never"
    )
    pipe(torch.ones(8, 3, dtype=torch.float64))  # the first one is looked at, and copied for that
    with measure_memory(pipe) as meter:
        pipe(torch.ones(8, 3, dtype=torch.float64))
    one = 8 * 3 * 8  # one tensor's bytes: what it receives, and no more
    assert meter.peak_bytes[1] <= one
    assert meter.peak_bytes[2] <= one


def test_a_skip_is_freed_after_its_last_use() -> None:
    """Without a graph, nothing of a skip is left when the layer that popped it has returned."""
    references: list[weakref.ref[Tensor]] = []

    @skippable(stash=["x"])
    class Source(nn.Module):
        def forward(self, x: Tensor) -> Any:
            image = x * 2
            references.append(weakref.ref(image))
            yield stash("x", image)
            return x

    @skippable(pop=["x"])
    class Sink(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("x"))

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert references[-1]() is None
            return x

    for balance in ([4], [1, 1, 2]):
        pipe = GPipe(nn.Sequential(Source(), nn.Identity(), Sink(), Look()), balance)
        with torch.no_grad():
            output = pipe(torch.ones(2, 2))
        assert output.tolist() == [[3.0, 3.0]] * 2
        pipe.close()
    gc.collect()
    assert all(reference() is None for reference in references)


@MODES
def test_nothing_is_left_after_the_backward(checkpoint: CheckpointMode) -> None:
    """All storages that a step made, but for output and gradients, are gone after it."""
    model = nn.Sequential(layer(stashes=("s",)), layer(), layer(pops=("s",)))
    pipe = GPipe(model, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    inputs = torch.ones(6, 3, dtype=torch.float64)
    pipe(inputs).sum().backward()
    pipe.zero_grad()
    with measure_memory(pipe) as meter:
        live = meter.ledger.start_peak()
        pipe(inputs).sum().backward()
        pipe.zero_grad()
        # Of what has been seen since, only the caller's own input is left.
        assert meter.ledger.start_peak() == live + inputs.untyped_storage().nbytes()


def test_namespaces_keep_pairs_of_one_name_apart() -> None:
    """Two pairs of the same name in two namespaces cross two cuts without meeting."""
    outer, inner = Namespace(), Namespace()
    layers = [layer(stashes=("x",)), layer(stashes=("x",)), layer(pops=("x",)), layer(pops=("x",))]
    for one, namespace in zip(layers, [outer, inner, inner, outer], strict=True):
        one.isolate(namespace)  # type: ignore[operator]
    plain = nn.Sequential(*layers)
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 1, 1], chunks=2)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(pipe(inputs), plain(inputs))


def test_namespaces_may_change_between_steps() -> None:
    """A skip that is moved into a namespace goes the same way from the next mini-batch on."""
    model = nn.Sequential(keep("kept"), nn.Linear(4, 4), give("kept", torch.add))
    pipe = GPipe(model, [1, 1, 1], chunks=2)
    inputs = torch.ones(4, 4)
    before = pipe(inputs)
    namespace = Namespace()
    for layer in (pipe[0], pipe[2]):
        layer.isolate(namespace)  # type: ignore[operator]
    assert torch.equal(pipe(inputs), before)
    pipe[2].isolate(None)  # type: ignore[operator]
    with pytest.raises(ModelError, match="skips do not pair up"):
        pipe(inputs)


def test_skips_that_do_not_pair_up_are_refused_when_the_pipe_is_made() -> None:
    """A skip that is popped and not stashed is an error before anything runs, naming the layer."""
    with pytest.raises(ModelError, match="layer '1' pops 'x', which no layer stashes"):
        GPipe(nn.Sequential(nn.Identity(), layer(pops=("x",))), [1, 1])


def test_a_failing_layer_leaves_no_skips_behind() -> None:
    """After an exception between stash and pop the next mini-batch works."""
    fail = [True]

    class Fault(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fail[0]:
                raise ValueError("broken")
            return x

    for balance in ([3], [1, 1, 1]):
        model = nn.Sequential(layer(stashes=("x",)), Fault(), layer(pops=("x",)))
        pipe = GPipe(model, balance, chunks=2)
        fail[0] = True
        with pytest.raises(ValueError, match="broken"):
            pipe(torch.ones(4, 3, dtype=torch.float64))
        fail[0] = False
        pipe(torch.ones(4, 3, dtype=torch.float64)).sum().backward()


class Undecorated(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return x


@pytest.mark.parametrize("balance", [[1, 2], [2, 1]])
def test_a_forgotten_decorator_is_named(balance: list[int]) -> None:
    """A forward with a yield returns a generator, of which users have never heard."""
    model = nn.Sequential(Undecorated(), nn.Linear(2, 2), nn.ReLU())
    fix = r"\nFix: decorate the layer's class, @skippable\("
    with pytest.raises(ModelError, match=rf"layer '0' returned no tensor: got generator .*{fix}"):
        GPipe(model, balance, chunks=2)(torch.ones(4, 2))
    with pytest.raises(ModelError, match=rf"layer '0' returned no tensor.*{fix}"):
        profile_model(model, torch.ones(4, 2), chunks=2, timeout=0, progress=False)
