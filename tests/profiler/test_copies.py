"""Deep copies of layers and of what they keep."""

from __future__ import annotations

from typing import Any

from gpipebal.copies import deep_copy


def test_a_memo_names_what_was_copied_and_nothing_else() -> None:
    """An id in it that no object had would be taken for whatever is allocated there later."""
    memo: dict[int, Any] = {}
    value = [[1], [2]]
    copied = deep_copy(value, memo)
    assert copied == value and copied[0] is not value[0]
    assert set(memo) == {id(value), id(value[0]), id(value[1]), id(memo)}
    assert memo[id(value)] is copied
