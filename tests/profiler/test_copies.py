"""Deep copies of layers and of what they keep."""

from __future__ import annotations

from typing import Any

import torch

from gpipebal.copies import deep_copy
from gpipebal.profiler.estimate.stand_ins import _CopiesToMeta


def test_a_memo_names_what_was_copied_and_nothing_else() -> None:
    """An id in it that no object had would be taken for whatever is allocated there later."""
    memo: dict[int, Any] = {}
    value = [[1], [2]]
    copied = deep_copy(value, memo)
    assert copied == value and copied[0] is not value[0]
    assert set(memo) == {id(value), id(value[0]), id(value[1]), id(memo)}
    assert memo[id(value)] is copied


class Reads:
    """Reads values while it is made from what it was."""

    def __init__(self) -> None:
        self.table = torch.ones(2)
        self.calls: list[int] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state["table"].sum().item() == 2
        vars(self).update(state)


def test_what_reads_values_while_it_is_copied_is_copied_by_value() -> None:
    """All else around it is copied without values, and nothing is shared."""
    value = {
        "generator": torch.Generator().manual_seed(3),
        "reads": [Reads()],
        "table": torch.ones(2),
    }
    copied = deep_copy(value, {}, _CopiesToMeta())
    assert copied["table"].is_meta
    assert copied["reads"][0] is not value["reads"][0]
    assert copied["reads"][0].calls is not value["reads"][0].calls
    assert copied["generator"] is not value["generator"]
    assert torch.equal(copied["generator"].get_state(), value["generator"].get_state())
