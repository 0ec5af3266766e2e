"""Operations without a generator borrow the process's own; what draws nothing borrows nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpipebal.errors import PipelineError
from gpipebal.pipeline import random_ops
from gpipebal.pipeline.randomness import OwnRandomness


def test_an_operation_is_run_again_if_somebody_sets_the_lent_generator_meanwhile() -> None:
    """As `torch.utils.checkpoint` does in layers of other partitions, at any moment."""
    states = [torch.Generator().manual_seed(seed).get_state() for seed in range(20)]
    calls: list[int] = []

    def disturbed(x: Tensor, times: float) -> Tensor:
        calls.append(len(calls))
        before = torch.rand_like(x) if len(calls) % 2 else None
        if len(calls) <= times:
            torch.default_generator.set_state(states.pop())
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

    torch.manual_seed(0)
    outside = torch.default_generator.get_state()
    expected = drawn(0.0)
    for found, one in zip(drawn(4.0), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=0)
    assert len(calls) == 6
    assert torch.equal(torch.default_generator.get_state(), outside)
    with pytest.raises(PipelineError, match="random numbers of a layer are lost"):
        drawn(99.0)
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
    for name in random_ops.NEVER_DRAW - {"aten::_fused_sdp_choice", flash}:
        schema = random_ops._operation(name)._schema
        assert {"philox_seed", "philox_offset"} <= {each.name for each in schema.arguments}
