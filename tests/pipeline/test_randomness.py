"""Random numbers inside a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_chains import Apply
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe, is_checkpointing, is_recomputing
from gpipebal.pipeline.randomness import random_ops
from gpipebal.pipeline.randomness.random_ops import prepare
from gpipebal.pipeline.randomness.randomness import OwnRandomness


class Noise(nn.Module):
    """Add random numbers of several kinds, and keep what was added in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[str, list[Tensor]] = {"first": [], "again": []}

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) + torch.randn(x.shape) + torch.randint(0, 9, x.shape)
        self.drawn["again" if is_recomputing() else "first"].append(noise)
        return x + noise * torch.nn.functional.dropout(x, 0.5)


def run(balance: list[int], checkpoint: str, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Run a chain with dropout; return its output and the gradient of its input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2)
    )
    pipe = GPipe(model, balance, chunks=3, checkpoint=checkpoint)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    inputs = torch.ones(7, 6, requires_grad=True)
    output = pipe(inputs)
    output.sum().backward()
    pipe.close()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def test_result_depends_on_the_seed_alone() -> None:
    """The same seed gives the same numbers for every balance, mode and run; another does not."""
    expected = run([5], "never")
    for balance in ([5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]):
        for checkpoint in ("never", "except_last", "always"):
            for _ in range(2):
                output, gradient = run(balance, checkpoint)
                assert torch.equal(output, expected[0])
                torch.testing.assert_close(gradient, expected[1])
    assert not torch.equal(run([2, 3], "never", seed=8)[0], expected[0])


def test_mini_batches_differ() -> None:
    """Two mini-batches draw different numbers, and the caller's generator decides which."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [1, 1], chunks=2)
    inputs = torch.ones(4, 4)
    torch.manual_seed(1)
    first, second = pipe(inputs), pipe(inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(pipe(inputs), first)


def test_recompute_draws_what_the_forward_drew() -> None:
    """Every kind of random operation gives the same numbers in the recompute."""
    noise = Noise()
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), noise, nn.Linear(3, 3)), [1, 2], chunks=3)
    pipe.checkpoint = "always"
    pipe(torch.ones(6, 3)).sum().backward()
    assert len(noise.drawn["first"]) == len(noise.drawn["again"]) == 3
    for first, again in zip(noise.drawn["first"], reversed(noise.drawn["again"]), strict=True):
        assert torch.equal(first, again)
    assert not torch.equal(noise.drawn["first"][0], noise.drawn["first"][1])


def test_a_model_without_randomness_leaves_the_generator_alone() -> None:
    """Running a deterministic model draws nothing from the caller's generator."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), [1, 1], chunks=2)
    before = torch.default_generator.get_state()
    pipe(torch.ones(4, 3)).sum().backward()
    assert torch.equal(torch.default_generator.get_state(), before)


def test_dropout_keeps_the_right_share() -> None:
    """Masks of micro-batches are independent draws with the right probability."""
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Dropout(0.25)), [1, 1], chunks=4)
    kept = (pipe(torch.ones(400, 50)) != 0).float()
    assert abs(kept.mean().item() - 0.75) < 0.02
    parts = kept.split(100)
    assert all(not torch.equal(parts[0], other) for other in parts[1:])


def test_operations_without_a_generator_draw_from_a_lent_state() -> None:
    """An operation that takes no generator is seeded too, and the default state is put back."""
    library = torch.library.Library("gpipebal_test", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("noise", torch.rand_like, "CPU")
    prepare()
    before = torch.default_generator.get_state()
    values = []
    for seed in (1, 1, 2):
        with OwnRandomness(seed, 0).watching():
            values.append(torch.ops.gpipebal_test.noise(torch.ones(50)))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(torch.default_generator.get_state(), before)


def test_passes_are_told_apart() -> None:
    """Layers see (checkpointing, recomputing) as (T, F), then (F, T); without checkpoint (F, F)."""
    seen: list[tuple[bool, bool]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Look()), [2], chunks=2, checkpoint="except_last")
    pipe(torch.ones(2, 2)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    assert (is_checkpointing(), is_recomputing()) == (False, False)


class Applying(HigherOrderOperator):
    """An operation that is given a function, as `torch.cond` is given two."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.py_impl(DispatchKey.CompositeExplicitAutograd)(lambda run, x: run(x))
        self.py_impl(DispatchKey.Autograd)(lambda run, x: run(x))

    def __call__(self, run: Any, x: Tensor) -> Tensor:
        return super().__call__(run, x)  # type: ignore[no-any-return]


def test_what_functions_draw_that_operations_run_depends_on_the_seed_alone() -> None:
    """Whether the operation was made before the first pipeline or after it."""
    results = []
    before = Applying("gpipebal_before")
    runs: list[tuple[list[int], Any]] = [
        ([3], "never"),
        ([1, 2], "always"),
        ([1, 1, 1], "except_last"),
    ]
    for balance, checkpoint in runs:
        after = Applying("gpipebal_after")
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 4)]
        for operation in (before, after):
            layers.append(Apply(lambda x, run=operation: run(nn.functional.dropout, x)))
        pipe = GPipe(nn.Sequential(*layers), balance, chunks=2, checkpoint=checkpoint)
        output = pipe(torch.ones(4, 4))
        output.sum().backward()
        results.append((output.detach(), pipe[0].weight.grad))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_operations_that_run_functions_run_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch in which random operations are caught by a mode runs them too."""
    monkeypatch.setattr(random_ops, "_catchers", [None])
    operation = Applying("gpipebal_by_mode")
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: operation(torch.tanh, x)))
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="always")
    output = pipe(torch.ones(4, 4))
    output.sum().backward()
    torch.testing.assert_close(output, model(torch.ones(4, 4)))


def test_a_layer_that_is_run_again_inside_of_its_forward_may_not_draw() -> None:
    """By torch.utils.checkpoint and a backward of its own: other numbers would go unseen."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.dropout = nn.Dropout(0.5)

        def head(self, x: Tensor) -> Tensor:
            return (self.dropout(x) * self.weight).square()

        def forward(self, x: Tensor) -> Tensor:
            torch_checkpoint(self.head, x.detach(), use_reentrant=False).sum().backward()
            return x * 1

    model = nn.Sequential(Local(), nn.Linear(8, 1))
    pipe = GPipe(model, [1, 1], checkpoint="never")
    with pytest.raises(ModelError, match="draws random numbers while it is run again"):
        pipe(torch.ones(1, 8))
    model[0].dropout.p = 0.0
    pipe(torch.ones(1, 8)).sum().backward()
