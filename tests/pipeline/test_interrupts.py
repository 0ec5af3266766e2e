"""Interrupts between two statements: what was begun is ended, however far it had come."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.pipeline.layers.batchnorm import Statistics
from gpipebal.pipeline.layers.container import Container
from gpipebal.pipeline.process import eager, process_wide
from gpipebal.pipeline.process.blocks import SharedBlocks, all_shared_blocks
from gpipebal.pipeline.randomness import lent, seeds
from gpipebal.pipeline.randomness.seeds import MiniBatchSeed

pytestmark = pytest.mark.timeout(60)


def _interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_at(
    n: int,
    function: Callable[..., Any],
    run: Callable[[], None],
    handler: Callable[[], None] = _interrupt,
) -> None:
    """Run something, and interrupt it in a function, where Python looks for signals the n-th time.

    That is when Python code is called, and when other code has returned.
    """
    code = getattr(function, "__wrapped__", function).__code__
    before, left = sys.getprofile(), [n]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        codes = [frame.f_code]
        if event == "call" and frame.f_back is not None:
            codes.append(frame.f_back.f_code)
        if event in ("call", "c_return") and code in codes:
            left[0] -= 1
            if not left[0]:
                sys.setprofile(before)
                handler()

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)


def test_a_phase_that_was_interrupted_as_it_began_is_over() -> None:
    """Else a later mini-batch that begins with the same state would draw other numbers."""
    entered: list[int] = []
    for n in range(1, 30):

        def begin(n: int = n) -> None:
            with MiniBatchSeed(None).in_phase():
                entered.append(n)

        try:
            interrupted_at(n, MiniBatchSeed.in_phase, begin)
        except KeyboardInterrupt:
            assert entered or (not seeds._under_way and not lent._noting)
        if entered:
            break
    assert 3 < entered[0] < 29
    seeds._under_way.clear()
    lent._noting.clear()


def state_of(pipe: GPipe) -> tuple[object, ...]:
    """Return what an interrupt must not leave changed."""
    blocks = [one.here() for one in all_shared_blocks()]
    notes = process_wide._inside, seeds._under_way, lent._noting
    return blocks, [len(one) for one in notes], pipe._recorder, pipe._ledger


@pytest.mark.parametrize(
    "function",
    [
        MiniBatchSeed._end_phase,
        MiniBatchSeed._put_back,
        process_wide._leave,
        process_wide.current_settings,
        SharedBlocks.leave_all_but,
        Container.stop_recording,
        Container.stop_metering,
    ],
)
def test_what_is_ended_is_over_though_it_is_interrupted(function: Callable[..., Any]) -> None:
    """A second attempt does what the first one has not done."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [1, 1])

    def run() -> None:
        with trace(pipe), measure_memory(pipe):
            pipe(torch.ones(2, 2)).sum().backward()

    run()
    before, n_interrupts = state_of(pipe), 0
    for n in range(1, 200):
        try:
            interrupted_at(n, function, run)
        except KeyboardInterrupt:
            n_interrupts += 1
        else:
            break
        assert state_of(pipe) == before
    assert n_interrupts > 1
    run()


def test_a_block_that_was_interrupted_as_it_began_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was about to install is removed."""
    done: list[str] = []

    def install() -> None:
        done.append("installed")
        raise KeyboardInterrupt

    def begin_eagerly() -> None:
        with eager.run_eagerly():
            raise AssertionError("the block runs")

    blocks = SharedBlocks(install, lambda: done.append("removed"))
    monkeypatch.setattr(eager, "_blocks", blocks)
    for begin in (begin_eagerly, lambda: blocks.enter_with(lambda: None)):
        with pytest.raises(KeyboardInterrupt):
            begin()
        assert done == ["installed", "removed"] and not blocks.here()
        done.clear()


@pytest.mark.parametrize("name", ["start_recording", "start_metering"])
def test_a_watch_that_was_interrupted_as_it_began_is_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is not refused as a second one."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    start = getattr(Container, name)

    def interrupted(self: Container, watcher: Any) -> None:
        start(self, watcher)
        raise KeyboardInterrupt

    for watch in (trace, measure_memory):
        with monkeypatch.context() as patch:
            patch.setattr(Container, name, interrupted)
            try:
                with watch(pipe):
                    pass
            except KeyboardInterrupt:
                pass
    with trace(pipe) as recorder, measure_memory(pipe):
        pipe(torch.ones(2, 2))
    assert len(recorder.timelines) == 1


@pytest.mark.parametrize(
    "function",
    [
        SharedBlocks.enter,
        SharedBlocks.leave_all_but,
        process_wide.settings_entered,
        process_wide._leave,
        Statistics.commit,
    ],
)
def test_a_signal_handler_may_run_a_pipeline(function: Callable[..., Any]) -> None:
    """Also one that comes where its own thread holds a lock which the pipeline takes."""
    layers = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)]
    outer, inner = (
        GPipe(nn.Sequential(*copy.deepcopy(layers)), [2, 1], chunks=2, deferred_batch_norm=True)
        for _ in range(2)
    )
    x = torch.randn(4, 2)
    expected = outer(x)
    called: list[torch.Tensor] = []

    def handler() -> None:
        called.append(inner(x))

    before = state_of(outer)
    for n in range(1, 200):
        interrupted_at(n, function, lambda: outer(x).sum().backward(), handler)
        assert state_of(outer) == before
        if len(called) < n:
            break
    assert called
    assert all(torch.equal(output, expected) for output in [*called, outer(x)])
    for pipe, n_steps in ((inner, len(called)), (outer, n + 2)):
        assert int(pipe[1].num_batches_tracked) == n_steps


def test_another_watch_leaves_the_first_one_alone() -> None:
    """It is refused, and the first goes on."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    with trace(pipe) as recorder, measure_memory(pipe) as meter:
        for watch in (trace, measure_memory):
            with pytest.raises(RuntimeError, match="already"), watch(pipe):
                pass
        pipe(torch.ones(2, 2))
    assert len(recorder.timelines) == 1 and meter.total_peak_bytes > 0
