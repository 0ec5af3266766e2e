"""Where skips wait: stores, threads, memory, and the namespaces in their keys."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skip_layers import give, keep, layer, run
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipebal.skip import Namespace, namespace, pop, stash
from gpipebal.skip.tracker import Skips, current, using

# --- Where skips wait


def test_using_nests_and_comes_back() -> None:
    """Layers see the innermost skips only, also after an error."""
    outer, inner, own = Skips(), Skips({(None, "a"): 2}), current()
    with using(outer):
        keep("a")(1)
        with pytest.raises(KeyError), using(inner):
            assert give("a")(0) == 2
            keep("a")(3)
            raise KeyError
        assert current() is outer
        assert give("a")(0) == 1
    assert current() is own
    assert (outer.take_all(), inner.take_all(), inner.take_all()) == ({}, {(None, "a"): 3}, {})
    with pytest.raises(RuntimeError, match=r"not been stashed.*\(none\)"):
        give("a")(0)


def test_stashing_again_before_the_pop_is_an_error_inside_using() -> None:
    """Where a forward has a beginning and an end, a second stash is a mistake."""
    ns = Namespace()
    model = keep("a").isolate(ns)
    with using(Skips()):
        model(1)
        with pytest.raises(
            RuntimeError, match=r"'a' of <Namespace \d+> is stashed again"
        ) as caught:
            model(2)
        assert "\nFix: " in str(caught.value)
        assert give("a").isolate(ns)(0) == 1
        model(3)


def test_what_a_failed_forward_left_behind_gives_way() -> None:
    """Outside of using, the next forward's stash replaces a value that was never popped."""
    fail = [True]

    def forward(x: Any) -> Any:
        if fail[0]:
            raise ValueError
        return x

    model = nn.Sequential(keep("a"), layer(forward), give("a"))
    with pytest.raises(ValueError):
        model(1)
    fail[0] = False
    assert model(2) == 2


def test_threads_do_not_see_each_others_skips() -> None:
    """Two threads stash under one name at the same time, and each pops its own value."""
    both_stashed = threading.Barrier(2, timeout=30)
    popped: dict[int, Any] = {}
    keep("a")("main")

    def work(me: int) -> None:
        with pytest.raises(RuntimeError, match="not been stashed"):
            give("a")(0)
        keep("a")(me)
        both_stashed.wait()
        popped[me] = give("a")(0)

    threads = [threading.Thread(target=work, args=(me,)) for me in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert popped == {1: 1, 2: 2}
    assert give("a")(0) == "main"


# --- Memory


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let nothing be freed but by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("grad", [False, True])
def test_storages_live_from_stash_to_last_use(grad: bool) -> None:
    """Between the layers there are as many storages as skips between their two ends."""
    made: list[StorageWeakRef] = []
    counts: list[int] = []

    def image(x: Tensor) -> Tensor:
        value = x + 1
        made.append(StorageWeakRef(value.untyped_storage()))
        return value

    def count(x: Tensor) -> Tensor:
        counts.append(sum(not storage.expired() for storage in made))
        return x

    # Neither addition saves its operands for the backward.
    names = "abc"
    layers = [keep(name, image) for name in names]
    layers += [give(name, lambda x, value: x + value) for name in reversed(names)]
    chain = nn.Sequential(*itertools.chain(*((one, layer(count)) for one in layers)))
    with torch.set_grad_enabled(grad):
        chain(torch.ones(5, requires_grad=True))
    assert counts == [1, 2, 3, 2, 1, 0]


@pytest.mark.usefixtures("no_collector")
def test_the_driver_keeps_nothing() -> None:
    """Inside one forward: a stashed value belongs to the skips, a popped one to the forward."""
    dead: list[bool] = []
    values: list[weakref.ref[Tensor]] = []

    def fresh() -> Tensor:
        value = torch.ones(1)
        values.append(weakref.ref(value))
        return value

    def forward(x: Any) -> Any:
        yield stash("a", fresh())
        dead.append(values[0]() is None)
        current().take_all()
        dead.append(values[0]() is None)
        current().save((None, "b"), fresh())
        value = yield pop("b")
        dead.append(values[1]() is None)
        del value
        with contextlib.suppress(RuntimeError):
            yield pop("missing")
        dead.append(values[1]() is None)
        return x

    layer(forward, stash=["a"], pop=["b"])(0)
    assert dead == [False, True, False, True]


@pytest.mark.usefixtures("no_collector")
def test_a_caught_error_keeps_no_tensor() -> None:
    """Once an error is dealt with, no circle of references holds what the forward had."""
    values: list[weakref.ref[Tensor]] = []

    def forward(x: Any) -> Any:
        value = torch.ones(1)
        values.append(weakref.ref(value))
        yield pop("missing")

    with contextlib.suppress(RuntimeError):
        run(forward, pop=["missing"])()
    assert values[0]() is None


# --- Namespaces


def test_namespaces_of_other_processes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces that are the first of their process each are two."""
    monkeypatch.setattr(namespace, "_serials", itertools.count())
    first = Namespace()
    monkeypatch.setattr(namespace, "_serials", itertools.count())
    second = Namespace()
    assert repr(first) == repr(second) == "<Namespace 0>"
    assert first != second and (first < second) != (second < first)


def test_namespaces_are_ordered_as_they_were_made() -> None:
    """The order is the same in every run, and the default namespace comes first."""
    made = [Namespace() for _ in range(12)]
    mixed: list[Namespace | None] = [*made, None]
    random.Random(0).shuffle(mixed)
    assert sorted(mixed, key=lambda ns: (ns, "a")) == [None, *made]
    with pytest.raises(TypeError):
        _ = made[0] < 3


COPIES = {
    "itself": lambda ns: ns,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda ns, p=protocol: pickle.loads(pickle.dumps(ns, p))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(COPIES))), min_size=3))
def test_namespace_laws(draws: list[tuple[int, str]]) -> None:
    """Copies equal their original and nothing else; hash and total order agree with that."""
    originals = [Namespace() for _ in range(4)]
    drawn = [(which, COPIES[how](originals[which])) for which, how in draws]
    for i, a in drawn:
        assert a != None and a > None and not a < None  # noqa: E711
        assert a != (None,) and a != i
        for j, b in drawn:
            assert (a == b) == (i == j)
            assert (a != b) == (i != j)
            assert (hash(a) == hash(b)) or i != j
            assert [a < b, a == b, a > b] == [i < j, i == j, i > j]
            assert [a <= b, a >= b] == [i <= j, i >= j]
    assert len({ns for _, ns in drawn}) == len({which for which, _ in drawn})
    assert sorted(ns for _, ns in drawn) == [
        originals[which] for which in sorted(w for w, _ in drawn)
    ]
