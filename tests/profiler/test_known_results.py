"""Known results: operations on meta tensors are looked up, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gpipebal.pipeline.values.tensors import storage_key
from gpipebal.profiler.estimate.known_results import KnownResults

aten = torch.ops.aten
META = torch.device("meta")


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operation that counts how often it runs."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self.namespace, self._schema, self.tags = func.namespace, func._schema, func.tags
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self._func(*args, **kwargs)


class Looked(TorchDispatchMode):
    """Looks results up, as an estimate does, and counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownResults()
        self.counted: dict[Any, Counted] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counted = self.counted.setdefault(func, Counted(func))
        return self._known.of(counted, args, kwargs or {})


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _seen(value: Any, operands: Any) -> list[Any]:
    """Return all that can be seen of results and operands, and which of them share memory."""
    found = [*_tensors(operands), *_tensors(value)]
    keys = [storage_key(one) for one in found]
    return [
        (
            *(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one._version),
            one.untyped_storage().nbytes(),
            keys.index(key),
        )
        for one, key in zip(found, keys, strict=True)
    ] + [None if leaf is None else type(leaf) for leaf in pytree.tree_leaves(value)]


def _image() -> Tensor:
    return _new(2, 3, 8, 8)


def _norm_operands() -> tuple[Any, ...]:
    return _image(), *(_new(3) for _ in range(4)), True, 0.1, 1e-5


#: Each operation with fresh operands, and whether it runs again where it has run before.
OPERATIONS: list[tuple[Any, Callable[[], tuple[Any, ...]], bool]] = [
    (aten.mm.default, lambda: (_new(2, 3), _new(3, 4)), False),
    (aten.mm.default, lambda: (_new(2, 3), _new(4, 3).T), False),
    (aten.cat.default, lambda: ([_new(2, 3), _new(1, 3)],), False),
    (aten.native_layer_norm.default, lambda: (_new(4, 5), [5], None, None, 1e-5), False),
    (aten.sum.dim_IntList, lambda: (_image(), [1], True), False),
    (aten.clone.default, lambda: (_image().permute(0, 2, 3, 1),), False),
    (aten.add_.Tensor, lambda: (_new(4, 5), _new(5)), False),
    (aten.copy_.default, lambda: (_new(4, 5)[:, 1:3], _new(2)), False),
    (aten.view.default, lambda: (_new(4, 6), [3, 8]), True),
    (aten._unsafe_view.default, lambda: (_new(4, 6), [3, 8]), True),
    (aten.split.Tensor, lambda: (_new(4, 6), 2), True),
    (aten.resize_.default, lambda: (_new(4, 6), [9, 9]), True),
    (aten.t_.default, lambda: (_new(4, 6),), True),
    # Its schema does not say that it writes to running statistics, and no count of writes shows it.
    (aten.native_batch_norm.default, _norm_operands, False),
]


@pytest.mark.parametrize("case", range(len(OPERATIONS)))
def test_a_second_result_is_like_the_first_in_memory_of_its_own(case: int) -> None:
    """What is looked up looks like what the operation makes, and shares memory alike."""
    func, operands, runs_again = OPERATIONS[case]
    looked, told = Looked(), []
    for _ in range(3):
        args = operands()
        with looked:
            result = func(*args)
        told.append(_seen(result, args))
    args = operands()
    assert told == [_seen(func(*args), args)] * 3
    assert looked.counted[func].runs == (3 if runs_again else 1)


def test_what_works_in_place_returns_its_operand() -> None:
    """The result of an operation in place is the operand that it was given this time."""
    known = KnownResults()
    for _ in range(2):
        one = _new(4, 5)
        assert known.of(aten.mul_.Tensor, (one, _new(5)), {}) is one


def test_an_operation_in_place_that_turns_its_operand_does_so_each_time() -> None:
    """What changes strides always runs, where they have changed and where they have not."""
    known = KnownResults()
    square, other = _new(4, 4), _new(4, 6)
    for one in (square, square, other, other):
        before = one.stride()
        known.of(aten.t_.default, (one,), {})
        assert one.stride() == before[::-1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((_new(3, dtype=torch.int64), 1), (_new(3, dtype=torch.int64), 1.0)),
        ((_new(3, dtype=torch.bool), 1), (_new(3, dtype=torch.bool), True)),
        ((_new(3), 1), (_new(3, dtype=torch.float16), 1)),
        ((_new(4, 4), 1), (_new(4, 4).T, 1)),
    ],
)
def test_operands_that_look_otherwise_are_told_apart(one: Any, other: Any) -> None:
    """Dtypes, strides and kinds of numbers decide what is made."""
    known = KnownResults()
    for args in (one, other, one, other):
        found, expected = known.of(aten.add.Tensor, args, {}), aten.add.Tensor(*args)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def _part(*shape: int) -> Tensor:
    """Return a part of something larger that looks as if it were all of it."""
    return _new(shape[0] + 2, *shape[1:])[2:]


@pytest.mark.parametrize(
    ("func", "others"),
    [
        (aten.select_scatter.default, lambda: (_new(6), 0, 1)),
        (aten.slice_scatter.default, lambda: (_new(2, 6), 0, 0, 2)),
        (aten.diagonal_scatter.default, lambda: (_new(4),)),
        (aten.as_strided_scatter.default, lambda: (_new(2), [2], [1], 0)),
    ],
)
def test_a_part_of_something_larger_is_scattered_into_as_such(
    func: Any, others: Callable[[], tuple[Any, ...]]
) -> None:
    """The copy is as large as what the part belongs to, whatever ran before."""
    known = KnownResults()
    for first in (_new(4, 6), _part(4, 6), _new(4, 6)):
        args = (first, *others())
        assert _seen(known.of(func, args, {}), args) == _seen(func(*args), args)


def test_an_operand_gets_another_place_in_memory_each_time() -> None:
    """Also where it had that place already when the operation first ran."""
    known = KnownResults()
    for one, other in ((same := _new(6), same), (_new(6), _new(6))):
        known.of(aten.set_.source_Tensor, (one, other), {})
        assert storage_key(one) == storage_key(other)
    for one in (_new(4, 6), _part(4, 6)):
        known.of(aten.as_strided_.default, (one, [4, 6], [6, 1], 0), {})
        assert one.storage_offset() == 0


def test_zeros_without_elements_are_made_each_time() -> None:
    """Autograd leaves out what would be added to them."""
    known = KnownResults()
    for _ in range(2):
        made = known.of(aten._efficientzerotensor.default, ([4],), {"device": META})
        assert made._is_zerotensor()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_new_tensors_are_of_the_present_default_dtype() -> None:
    """The default dtype belongs to the question."""
    known = KnownResults()
    for dtype in (torch.float32, torch.float64, torch.float32):
        with _default_dtype(dtype):
            assert known.of(aten.ones.default, ([2],), {"device": META}).dtype == dtype


def test_tensors_with_values_and_errors_are_not_remembered() -> None:
    """Operations with values run each time, and refused ones are refused each time."""
    known = KnownResults()
    for value in (1.0, 2.0):
        found = known.of(aten.exp.default, (torch.full((2,), value),), {})
        torch.testing.assert_close(found, torch.full((2,), value).exp())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            known.of(aten.mm.default, (_new(2, 3), _new(2, 3)), {})


def test_an_error_has_no_other_one_before_it() -> None:
    """Where an operand has values, nothing but the operation's own error is told."""
    with pytest.raises(RuntimeError) as caught:
        KnownResults().of(aten.mm.default, (torch.ones(2, 3), _new(2, 3)), {})
    assert caught.value.__context__ is None
