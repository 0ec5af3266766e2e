"""Pools of workers and their inboxes: what is handed out, in which order, and what stays."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpipebal.pipeline import GPipe
from gpipebal.pipeline.workers import worker
from gpipebal.pipeline.workers.inbox import Inbox, InboxClosedError, Stop

pytestmark = pytest.mark.timeout(60)


def make_pipe() -> GPipe:
    """Make a pipeline of two partitions, and start its workers."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1], chunks=2)
    pipe(torch.ones(4, 2)).sum().backward()
    return pipe


def test_tasks_of_two_threads_reach_all_workers_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each worker might wait for the mini-batch that the other one has behind its own."""
    pipe = make_pipe()
    pool = pipe._started().pool
    found: list[list[str]] = [[], []]

    def hand_out() -> None:
        pool.submit([lambda: None, lambda: None])

    second = threading.Thread(target=hand_out)

    class Queue:
        """Notes whose tasks it gets; the second thread comes between the first one's two."""

        def __init__(self, j: int) -> None:
            self.j = j

        def put(self, task: Any) -> None:
            is_second = threading.current_thread() is second
            found[self.j].append("second" if is_second else "first")
            if not self.j and not is_second:
                second.start()
                second.join(0.2)  # it has to wait

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_queues", [Queue(0), Queue(1)])
        hand_out()
        second.join(20)
    assert found == [["first", "second"]] * 2
    pipe.close()


def test_a_pool_forgets_whom_it_has_waited_for() -> None:
    """Of the flags of mini-batches that are over it keeps none."""
    pipe = make_pipe()
    pool = pipe._started().pool
    for fails in (False, True):
        if fails:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                pipe(torch.ones(4, 3))
        pipe(torch.ones(4, 2)).sum().backward()
        assert not pool._awaited
    pipe.close()


def test_threads_that_have_ended_are_not_kept() -> None:
    """However many pipelines a process has had, only threads that the system knows are listed."""
    gc.collect()
    for _ in range(3):
        pipe = make_pipe()
        ended = pipe._started().pool.threads
        pipe.close()
        assert not any(thread.is_alive() for thread in ended)
    pipe = make_pipe()
    known = worker._known_threads
    assert all(thread in known for thread in pipe._started().pool.threads)
    gone = [one for one in known if not worker._is_known_to_the_system(one)]
    assert not set(gone) - set(ended)  # the system may forget the last ones a moment later
    pipe.close()


class Value:
    """What is on its way."""


def test_a_stopped_inbox_keeps_nothing() -> None:
    """Neither what it had, nor what comes after the stop; and it gives nothing out."""
    stop = Stop()
    inbox = Inbox(stop)
    before, after = Value(), Value()
    gone = [weakref.ref(before), weakref.ref(after)]
    inbox.put("before", before)
    stop.is_set = True
    with pytest.raises(InboxClosedError):
        inbox.take("before")
    inbox.wake()
    inbox.put("after", after)
    del before, after
    gc.collect()
    assert [one() for one in gone] == [None, None]
    with pytest.raises(InboxClosedError):
        inbox.take("after")
