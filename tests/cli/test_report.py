"""The report of a run: what it says of given figures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpipebal.plan import PeakMemory
from gpipebal.report import PlainTimes, RunReport, notes_on_threads, notes_on_waiting

REPORT = RunReport(
    model="tiny",
    n_parameters=1000,
    devices=("cpu", "cpu"),
    cores=2,
    threads_per_partition=1,
    balance=(2, 3),
    chunks=8,
    mini_batch_rows=32,
    image_size=None,
    checkpoint="never",
    seed=0,
    loss="cross_entropy",
    optimizer="SGD(lr=0.01)",
    predicted_step_time=1.9,
    step_times=(2.0, 1.5, 4.0),
    predicted_peak_bytes=(2048, 4096),
    peak_bytes=(2048, 2048),
    total_peak_bytes=3072,
    plain=(
        PlainTimes("1 thread", 1, (3.0, 3.0, 3.0)),
        PlainTimes("2 threads", 2, (1.5, 1.0, 2.0)),
    ),
    notes=("something to know.",),
)

TEXT = """\
tiny on 2 partitions (cpu, 1 thread each), a mini-batch of 32 rows in 8 micro-batches, \
checkpoint='never', loss cross_entropy, optimizer SGD(lr=0.01)

                           predicted   measured   predicted is off by
training step                 1.90 s     2.00 s                -5.0 %
peak memory, partition 0    2.00 KiB   2.00 KiB                 0.0 %
peak memory, partition 1    4.00 KiB   2.00 KiB              +100.0 %
peak memory, sum            6.00 KiB   4.00 KiB               +50.0 %
memory, most at one time               3.00 KiB

training step of the     median   fastest   slowest     pipeline is
pipeline                 2.00 s    1.50 s    4.00 s
plain model, 1 thread    3.00 s    3.00 s    3.00 s   1.50x as fast
plain model, 2 threads   1.50 s    1.00 s    2.00 s   0.75x as fast

The pipeline is faster than the plain model with 1 thread: it takes 33.3 % less time per step \
(faster in 2 of 3 turns).
The pipeline is slower than the plain model with 2 threads: it takes 33.3 % more time per step \
(slower in 3 of 3 turns).
Times are of 3 steps, taken alternately after one warm-up; the plain model does the same \
micro-batches one by one, without recompute.
Note: something to know."""


def test_report_says_plainly_what_came_out() -> None:
    """Predicted stands beside measured, and slower is called slower."""
    assert str(REPORT) == TEXT
    assert REPORT.speedups == {"1 thread": 1.5, "2 threads": 0.75}
    assert REPORT.step_time_error == pytest.approx(-0.05)


def test_report_without_prediction_says_unknown() -> None:
    """A step time that could not be predicted is not made up."""
    report = replace(REPORT, predicted_step_time=None, plain=())
    assert re.search(r"training step +unknown +2\.00 s\n", str(report))
    assert report.step_time_error is None
    cuda = replace(REPORT, plain=(PlainTimes("cuda:0", None, (4.0,)),))
    assert "faster than the plain model on cuda:0: it takes 50.0 % less" in str(cuda)


def test_a_note_says_where_more_threads_are_slower() -> None:
    """Only where a step takes twice as long or more, and both ran on a CPU."""
    one = PlainTimes("1 thread", 1, (2.0, 1.0, 1.0))
    (note,) = notes_on_threads([PlainTimes("2 threads", 2, (9.0, 2.0, 2.0)), one])
    assert "2.0 times as long with 2 threads as with 1 thread" in note
    assert "OMP_WAIT_POLICY=passive" in note
    assert not notes_on_threads([one, PlainTimes("2 threads", 2, (1.9,))])
    assert not notes_on_threads([one, PlainTimes("cuda:0", None, (9.0,))])
    assert not notes_on_threads([one, replace(one, step_times=(9.0, 9.0))])
    slower = [PlainTimes(f"{n} threads", n, (seconds,)) for n, seconds in ((2, 1.9), (8, 3.7))]
    (note,) = notes_on_threads([*slower, one])
    assert "3.7 times as long with 8 threads as with 1 thread" in note
    assert not notes_on_threads([])


@pytest.mark.parametrize(
    ("waiting", "measured", "is_said"),
    [
        (100, 900, True),
        # All that may wait did.
        (100, 1000, False),
        # A little less waited.
        (100, 990, False),
        # What may wait is less than the difference: something else was counted too.
        (100, 800, False),
        (0, 900, False),
    ],
)
def test_memory_that_did_not_wait_is_named(waiting: int, measured: int, is_said: bool) -> None:
    """A plan counts what may wait in any timing, and a reader sees the difference."""
    memory = PeakMemory(activations=1000 - waiting, waiting=waiting)
    notes = notes_on_waiting([PeakMemory(activations=10), memory], [10, measured])
    assert [f"({waiting} B of partition 1)" in note for note in notes] == [True] * is_said
