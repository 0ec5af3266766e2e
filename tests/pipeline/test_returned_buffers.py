"""Buffers and parameters that layers return: what others read stays as it was when it was sent."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(60)


class Table(nn.Module):
    """Returns a large buffer, and counts in it from some call on."""

    table: Tensor

    def __init__(self, begin: int, returned_from: int = 0) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(20_000))
        self.begin, self.returned_from, self.calls = begin, returned_from, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > self.begin:
            self.table.add_(1)
        return x, self.table if self.calls > self.returned_from else torch.zeros(20_000)


class Late(nn.Module):
    """Adds the buffer, late enough for the next micro-batch to have been through."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return pair[0] + pair[1][:2]


def chain(begin: int, returned_from: int = 0) -> nn.Sequential:
    """Return a chain that is cut behind the layer with the buffer."""
    return nn.Sequential(nn.Linear(2, 2), Table(begin, returned_from), Late())


@pytest.mark.parametrize("returned_from", [0, 6])
@pytest.mark.parametrize("grad", [False, True])
def test_a_buffer_that_is_written_to_from_a_later_step_on(grad: bool, returned_from: int) -> None:
    """Copies of it are sent from the first write on, also if it is first returned then."""
    model = chain(4, returned_from)
    plain, inputs = copy.deepcopy(model), torch.randn(4, 2)
    pipe = GPipe(model, [2, 1], chunks=4, checkpoint="never")
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            found, expected = pipe(inputs), run_plain(plain, inputs, 4)
        torch.testing.assert_close(found, expected)
        if grad:
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_a_buffer_that_is_written_to_in_the_middle_of_a_mini_batch() -> None:
    """Others may have read what was sent: an error, and right from the next mini-batch on."""
    pipe = GPipe(chain(6), [2, 1], chunks=4)
    inputs = torch.randn(4, 2)
    with torch.no_grad():
        pipe(inputs)
        with pytest.raises(ModelError, match="'table' of a Table was written to while others"):
            pipe(inputs)
        linear, layer = pipe[0], pipe[1]
        expected = [linear(row) + layer.table[0] + k + 1 for k, row in enumerate(inputs)]  # type: ignore[operator, index, union-attr]
        torch.testing.assert_close(pipe(inputs), torch.stack(expected))


def test_buffers_that_the_caller_writes_to_are_sent_as_they_are() -> None:
    """No layer writes to them, so nothing is copied, whatever happens between mini-batches."""
    pipe = GPipe(chain(1000), [2, 1], chunks=4)
    seen: list[Any] = []

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0][1].data_ptr())

    pipe[2].register_forward_pre_hook(look)
    table = pipe[1].table
    with torch.no_grad():
        for step in range(3):
            pipe(torch.zeros(4, 2))
            table.fill_(step)
            assert pipe[1].table is table
    # The first micro-batch of a kind works on copies of its input.
    assert set(seen[1:]) == {table.data_ptr()}


class Center(nn.Module):
    """Returns a small buffer with a running mean, but not in the first call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.has_begun = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        now = x.detach().mean(0)
        if not self.has_begun:
            self.has_begun = True
            self.mean.copy_(now)
            return x, now
        self.mean.lerp_(now, 0.5)
        return x, self.mean


def test_a_small_buffer_that_is_first_returned_later() -> None:
    """The first micro-batch does not tell which outputs are buffers."""
    plain = nn.Sequential(Center(), Late())
    pipe, inputs = GPipe(copy.deepcopy(plain), [1, 1], chunks=4), torch.randn(4, 2)
    for _ in range(2):
        torch.testing.assert_close(pipe(inputs), run_plain(plain, inputs, 4))


class Recurrent(nn.Module):
    """Returns a hidden state that the next call writes to, and puts the next one in its place."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20_000))
        self.register_buffer("hidden", torch.zeros(1, 20_000))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.mul_(0.5)
        new = x * self.weight + self.hidden
        self.hidden = new.detach()
        return new


#: A script is not made with annotations that are texts.
Recurrent.__annotations__["hidden"] = Tensor


class LateTwice(nn.Module):
    """Doubles, late enough for the next micro-batch to have been through."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return 2 * x


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_hidden_state_that_is_the_output(
    checkpoint: CheckpointMode, grad: bool, scripted: bool
) -> None:
    """The place of a buffer has got the output: it is copied, though a graph has computed it."""
    plain = nn.Sequential(Recurrent(), LateTwice())
    first: Any = torch.jit.script(Recurrent()) if scripted else Recurrent()
    pipe = GPipe(nn.Sequential(first, LateTwice()), [1, 1], chunks=4, checkpoint=checkpoint)
    inputs = torch.ones(4, 20_000)
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            found, expected = pipe(inputs), run_plain(plain, inputs, 4)
        torch.testing.assert_close(found, expected)
        if grad:
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda key: key,
    "view": lambda key: key[None, 1:],
    "coo": lambda key: torch.sparse_coo_tensor(
        torch.arange(len(key))[None], key, key.shape, check_invariants=True
    ),
    "csr": lambda key: torch.sparse_csr_tensor(
        torch.tensor([0, len(key)]),
        torch.arange(len(key)),
        key,
        (1, len(key)),
        check_invariants=True,
    ),
    "jagged": lambda key: torch.nested.nested_tensor_from_jagged(
        key, torch.tensor([0, 1, len(key)])
    ),
}


class Teacher(nn.Module):
    """Moves a key that no optimizer trains, and returns it in some form."""

    def __init__(self, form: str, kind: str, size: int) -> None:
        super().__init__()
        self.form = FORMS[form]
        if kind == "buffer":
            self.register_buffer("key", torch.zeros(size))
        else:
            self.key = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.key.lerp_(x.detach().mean().expand_as(self.key), 0.5)
        return x, self.form(self.key)


class LateSum(nn.Module):
    """Adds the sum of what comes with a value, in whatever form it is."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        key = pair[1].coalesce() if pair[1].layout is torch.sparse_coo else pair[1]
        return pair[0] + (key if key.layout is torch.strided else key.values()).sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("size", [4, 20_000])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("form", FORMS)
def test_a_moving_key_is_sent_as_it_is_now(form: str, kind: str, size: int) -> None:
    """Frozen parameters are as good as buffers, and parts of a tensor lie in memory too."""
    plain = nn.Sequential(Teacher(form, kind, size), LateSum())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4)
    inputs = torch.randn(4, 2)
    with torch.no_grad():
        torch.testing.assert_close(pipe(inputs), run_plain(plain, inputs, 4))


class Weight(nn.Module):
    """Returns its trained parameter, and writes to it from some call on."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.begin, self.calls = begin, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > self.begin:
            with torch.no_grad():
                self.weight.add_(1)
        return x, self.weight


def test_a_parameter_that_only_the_optimizer_writes_to_is_sent_as_it_is() -> None:
    """Tied weights may be large."""
    pipe = GPipe(nn.Sequential(Weight(1000), LateSum()), [1, 1], chunks=4, checkpoint="never")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    seen: list[int] = []
    pipe[1].register_forward_pre_hook(lambda _, given: seen.append(given[0][1].data_ptr()))
    for _ in range(2):
        pipe(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    # The first micro-batch of a kind works on copies of its input.
    assert set(seen[1:]) == {pipe[0].weight.data_ptr()}


def test_a_parameter_that_is_written_to_in_the_middle_of_a_mini_batch() -> None:
    """As with a large buffer: an error, and right from the next mini-batch on."""
    plain = nn.Sequential(Weight(2), LateSum())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4)
    inputs = torch.randn(4, 2)
    with torch.no_grad():
        with pytest.raises(ModelError, match="parameter 'weight' of a Weight was written to"):
            pipe(inputs)
        plain[0].load_state_dict(pipe[0].state_dict())
        plain[0].calls = pipe[0].calls
        torch.testing.assert_close(pipe(inputs), run_plain(plain, inputs, 4))


class Turning(nn.Module):
    """Returns one of two large buffers, and from some call on exchanges and writes to them."""

    one: Tensor
    two: Tensor

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(20_000))
        self.register_buffer("two", torch.zeros(20_000))
        self.begin, self.calls = begin, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls > self.begin:
            self.one, self.two = self.two, self.one
            self.one.add_(1)
        return x, self.one


@pytest.mark.parametrize("begin", [0, 2])
def test_buffers_that_are_exchanged(begin: int) -> None:
    """What has been sent is watched in whatever place it is."""
    plain = nn.Sequential(Turning(begin), Late())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=5)
    inputs = torch.randn(5, 2)
    with torch.no_grad():
        if begin:
            with pytest.raises(ModelError, match="of a Turning was written to while others read"):
                pipe(inputs)
        else:
            torch.testing.assert_close(pipe(inputs), run_plain(plain, inputs, 5))
