"""Operations without a generator borrow the process's own; what draws nothing borrows nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from gpipebal.errors import PipelineError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.randomness import lent, random_ops, seeds
from gpipebal.pipeline.randomness.randomness import OwnRandomness


def test_an_operation_is_run_again_if_somebody_sets_the_lent_generator_meanwhile() -> None:
    """As `torch.utils.checkpoint` does in layers of other partitions, at any moment."""
    torch.manual_seed(0)
    outside = torch.default_generator.get_state()
    calls: list[int] = []

    def disturbed(x: Tensor, times: float) -> Tensor:
        calls.append(len(calls))
        before = torch.rand_like(x) if len(calls) % 2 else None
        if len(calls) <= times:
            torch.default_generator.set_state(outside)
            torch.rand(len(calls) % 5)
        return torch.rand_like(x) if before is None else before

    library = torch.library.Library("gpipebal_test_lent", "FRAGMENT")
    library.define(
        "disturbed(Tensor x, float times) -> Tensor", tags=torch.Tag.nondeterministic_seeded
    )
    library.impl("disturbed", disturbed, "CPU")
    random_ops.prepare()

    def drawn(times: float) -> list[Tensor]:
        calls.clear()
        with OwnRandomness(1, 0).watching():
            first = torch.ops.gpipebal_test_lent.disturbed(torch.zeros(3), times)
            return [first, torch.ops.gpipebal_test_lent.disturbed(torch.zeros(3), 0.0)]

    expected = drawn(0.0)
    for found, one in zip(drawn(4.0), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=0)
    # Both, four times in vain, and for each state from which it may have drawn unseen: those that
    # it was found with, and the process's.
    assert len(calls) == 2 + 4 + 5
    assert torch.equal(torch.default_generator.get_state(), outside)
    with pytest.raises(PipelineError, match="random numbers of a layer are lost"):
        drawn(1e9)
    assert torch.equal(torch.default_generator.get_state(), outside)


def test_what_is_passed_by_draws_nothing() -> None:
    """Attention without dropout is not caught: what torch tags as random there is not."""
    q = torch.randn(1, 2, 8, 8)
    before = torch.default_generator.get_state()
    torch._fused_sdp_choice(q, q, q, dropout_p=0.5)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(torch.default_generator.get_state(), before)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {"aten::_fused_sdp_choice", flash} <= random_ops.NEVER_DRAW
    with pytest.raises(RuntimeError, match="do not support dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
    # Backwards are told where the forward's numbers began.
    for name in random_ops.NEVER_DRAW:
        if name.endswith("_backward"):
            schema = random_ops._operation(name)._schema
            assert {"philox_seed", "philox_offset"} <= {each.name for each in schema.arguments}


class Kept(nn.Module):
    """Draws nothing, and saves and restores the default generator in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = checkpoint(self._part, x, use_reentrant=False)
        return kept

    def _part(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Mapped(nn.Module):
    """Draws in an operation that takes no generator."""

    def forward(self, x: Tensor) -> Tensor:
        drawn: Tensor = torch.vmap(_dropped, randomness="different")(x)
        return drawn


def _dropped(row: Tensor) -> Tensor:
    return dropout(row.expand(500, 16), 0.3).mean(0)


def test_a_lent_state_is_not_left_behind() -> None:
    """What layers of other partitions save while it is lent, they put back some time."""
    base = nn.Sequential(Mapped(), *[Kept() for _ in range(6)]).double()
    x = torch.randn(32, 16, dtype=torch.float64)
    found = set()
    for _ in range(8):
        pipe = GPipe(copy.deepcopy(base), [1, 3, 3], chunks=8, checkpoint="never")
        torch.manual_seed(1)
        losses = [
            pipe.step(x, loss_fn=lambda y: y.square().sum(), schedule="1f1b").item()
            for _ in range(3)
        ]
        found.add((*losses, torch.rand(1).item()))
        pipe.close()
    assert len(found) == 1


def test_a_lent_state_at_the_end_of_a_phase_is_undone() -> None:
    """Whoever has saved it leaves it there last; the generator is put back."""
    torch.manual_seed(3)
    before = torch.default_generator.get_state()
    mini_batch = seeds.MiniBatchSeed(None)
    with mini_batch.in_phase():
        state = torch.Generator().manual_seed(9).get_state()
        lent.mark_as_lent(state)
        torch.default_generator.set_state(state)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_states_are_noted_for_their_own_mini_batch() -> None:
    """Whoever saved one in the forward leaves it behind a backward; elsewhere it is like others."""

    def state_after(n: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        torch.rand(n, generator=generator)
        return generator.get_state()

    mini_batch, other = seeds.MiniBatchSeed(None), seeds.MiniBatchSeed(None)
    torch.default_generator.set_state(state_after(0))
    lent._note_stray(state_after(2))  # of an operation outside of all
    with mini_batch.in_phase():
        lent._note_stray(state_after(1))
    for one, left, expected in ((other, 1, 1), (mini_batch, 1, 0), (mini_batch, 2, 2)):
        torch.default_generator.set_state(state_after(0))
        with one.in_phase():
            torch.default_generator.set_state(state_after(left))
        assert torch.equal(torch.default_generator.get_state(), state_after(expected))
    assert not lent._noting


def test_a_state_that_is_saved_in_another_loan_is_noticed() -> None:
    """Of the same generator, so that only the mark tells that it is of another moment."""
    saved: list[Tensor] = []

    def draws_two(x: Tensor) -> Tensor:
        saved.append(torch.default_generator.get_state())
        first = torch.rand_like(x)
        if len(saved) == 3:
            torch.default_generator.set_state(saved[0])
        return torch.stack([first, torch.rand_like(x)])

    library = torch.library.Library("gpipebal_test_two", "FRAGMENT")
    library.define("two(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("two", draws_two, "CPU")
    random_ops.prepare()
    with OwnRandomness(1, 0).watching():
        found = [torch.ops.gpipebal_test_two.two(torch.zeros(2)) for _ in range(4)]
    assert len(saved) == 5 + 2  # one was run again, and for the two states that it met
    assert len(torch.stack(found).unique()) == 16


def test_what_an_operation_left_unseen_is_noted() -> None:
    """Code that puts a state back, saves what is drawn from it, and puts it back once more."""
    torch.manual_seed(5)
    home = torch.default_generator.get_state()
    saved: list[Tensor] = []

    def disturbed(x: Tensor) -> Tensor:
        if saved:
            return torch.rand_like(x)
        torch.default_generator.set_state(home)
        drawn = torch.rand_like(x)
        saved.append(torch.default_generator.get_state())
        torch.default_generator.set_state(home)
        return drawn

    library = torch.library.Library("gpipebal_test_unseen", "FRAGMENT")
    library.define("draw(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("draw", disturbed, "CPU")
    random_ops.prepare()
    with seeds.MiniBatchSeed(None).in_phase():
        with OwnRandomness(1, 0).watching():
            found = torch.ops.gpipebal_test_unseen.draw(torch.zeros(2))
        torch.default_generator.set_state(saved[0])  # at last that code puts back what it saved
    assert torch.equal(torch.default_generator.get_state(), home)
    with OwnRandomness(1, 0).watching():
        assert torch.equal(torch.ops.gpipebal_test_unseen.draw(torch.zeros(2)), found)


@pytest.mark.parametrize("seed", [7, 8])
def test_an_operation_that_sets_the_generator_itself_draws_what_it_likes(seed: int) -> None:
    """It is nobody else's doing, also if the process had that seed."""
    torch.manual_seed(7)
    with seeds.MiniBatchSeed(None).in_phase():
        pass

    def own(x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(seed)
        return torch.rand_like(x)

    library = torch.library.Library(f"gpipebal_test_own_{seed}", "FRAGMENT")
    library.define("own(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("own", own, "CPU")
    random_ops.prepare()
    expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    own_operation = getattr(torch.ops, f"gpipebal_test_own_{seed}").own
    with OwnRandomness(1, 0).watching():
        found = own_operation(torch.zeros(3))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["p", "dropout_p", "training"])
def test_arguments_of_other_libraries_operations_mean_what_they_like(name: str) -> None:
    """A probability of 0 keeps dropout from drawing; what `p` is elsewhere nobody knows."""
    library = torch.library.Library(f"gpipebal_test_{name}", "FRAGMENT")
    schema = f"noise(Tensor x, float {name}) -> Tensor"
    library.define(schema, tags=torch.Tag.nondeterministic_seeded)
    library.impl("noise", lambda x, _: torch.rand_like(x), "CPU")
    random_ops.prepare()
    noise = getattr(torch.ops, f"gpipebal_test_{name}").noise
    found = []
    for _ in range(2):
        with OwnRandomness(1, 0).watching():
            found.append(noise(torch.zeros(3), 0.0))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_dropout_of_nested_tensors(layout: torch.layout) -> None:
    """It has no overload with a generator; a recompute draws the forward's numbers all the same."""

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = torch.nested.as_nested_tensor([x[0, :3], x[0, :5]], layout=layout)
            return x * torch.nested.to_padded_tensor(dropout(parts, 0.5), 0.0).sum()

    gradients = []
    for mode in ("never", "always"):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(4)
        pipe = GPipe(nn.Sequential(Nested()), [1], chunks=2, checkpoint=mode)
        pipe(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_operations_that_draw_nothing_are_not_run_again_and_again() -> None:
    """One that writes is run once; one of another library until that is known of it."""
    calls: list[str] = []

    def quiet(x: Tensor) -> Tensor:
        calls.append("quiet")
        return x + 1

    def writes(x: Tensor) -> None:
        calls.append("writes")
        x.add_(1)

    library = torch.library.Library("gpipebal_test_quiet", "FRAGMENT")
    library.define("quiet(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    library.impl("quiet", quiet, "CPU")
    library.define("writes(Tensor(a!) x) -> ()", tags=torch.Tag.nondeterministic_seeded)
    library.impl("writes", writes, "CPU")
    random_ops.prepare()
    x = torch.zeros(3)
    with OwnRandomness(1, 0).watching():
        torch.ops.gpipebal_test_quiet.writes(x)
        assert calls == ["writes"] and torch.equal(x, torch.ones(3))
        torch.ops.gpipebal_test_quiet.quiet(x)
        calls.clear()
        torch.ops.gpipebal_test_quiet.quiet(x)
    assert calls == ["quiet"]


def test_padded_attention_of_torch_draws_nothing() -> None:
    """Its softmax is tagged as random: it is not caught."""
    assert "aten::_nested_tensor_softmax_with_shape" in random_ops.NEVER_DRAW
