"""benchmarks/soak: a short one, what it must notice, and what its README says."""

from __future__ import annotations

import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_files import assert_in_readme, folder_of, stored
from torch import Tensor

from gpipebal.pipeline import GPipe
from gpipebal.pipeline.workers.failures import Failures

FOLDER = folder_of("soak")

from soak_benchmark import tables  # noqa: E402
from soak_benchmark.faults import ERRORS, INTERRUPT, Place, Record  # noqa: E402
from soak_benchmark.growth import BOUNDS, count_all, find_growth  # noqa: E402
from soak_benchmark.slots import make_slots  # noqa: E402
from soak_benchmark.soak import soak  # noqa: E402
from soak_benchmark.specs import WAYS, draw_spec  # noqa: E402
from soak_benchmark.steps import SoakError  # noqa: E402

pytestmark = pytest.mark.timeout(100)
PHASES = ("forward", "recompute", "backward")


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of results.json."""
    assert_in_readme("soak", tables.blocks(stored("soak")))


def test_stored_soak_is_whole_and_passed() -> None:
    """Ten thousand steps, every way and every fault in every phase, and nothing grew."""
    record = stored("soak")
    assert record["steps"] >= 10_000
    assert tables.is_passed(record)
    assert record["ways"].keys() == WAYS.keys()
    assert sum(record["ways"].values()) == record["steps"]
    times = {(fault["kind"], fault["phase"]): fault["times"] for fault in record["faults"]}
    assert times.keys() == {(kind, phase) for kind in (*ERRORS, INTERRUPT) for phase in PHASES}
    assert sum(times.values()) > record["steps"] / 10
    assert {growth["name"] for growth in record["growth"]} == BOUNDS.keys()


def test_short_soak() -> None:
    """Random steps with faults: no wrong number, no lost fault, no tensor, thread or file more."""
    record = soak(120, seed=1, every=10)
    assert sum(fault["times"] for fault in record["faults"]) > 15
    assert {fault["phase"] for fault in record["faults"]} == set(PHASES)
    assert record["ways"].keys() == WAYS.keys()
    exact = [growth for growth in record["growth"] if growth["bound"] == 0]
    assert len(exact) >= 2
    assert all(growth["first"] == growth["last"] for growth in exact), exact


def test_a_step_depends_on_its_seed_and_number_alone() -> None:
    """A step that is run on its own has the pipeline and the plans it has in the whole soak."""
    number = 700
    whole, alone = make_slots(5), make_slots(5)
    for step in range(0, number + 1, 10):
        for slot in whole:
            slot.begin(step)
    for slot in alone:
        slot.begin(number)
    assert draw_spec(5, number, whole) == draw_spec(5, number, alone)
    assert [slot.balance for slot in whole] == [slot.balance for slot in alone]
    assert draw_spec(5, number, alone) != draw_spec(6, number, alone)


def test_growth_is_found_by_what_is_above_the_bound() -> None:
    """The medians of the first and the last quarter decide, and each count has its own bound."""
    samples = [{"live tensors": 7.0, "Python objects": 50.0 * k} for k in range(8)]
    found = {growth.name: growth for growth in find_growth(samples)}
    assert found["live tensors"].is_within
    assert (found["Python objects"].first, found["Python objects"].last) == (25.0, 325.0)
    assert found["Python objects"].is_within
    samples[-1]["live tensors"] = samples[-2]["live tensors"] = 8.0
    assert not find_growth(samples)[0].is_within


def test_counts_see_what_is_left_behind() -> None:
    """One tensor, one thread, one open file and eight megabytes more are counted as that."""
    before = count_all()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    try:
        with Path(__file__).open() as file:
            kept = (torch.ones(2**21), file)
            after = count_all()
    finally:
        end.set()
        thread.join()
    grown = {name: after[name] - before[name] for name in before}
    assert (grown["live tensors"], grown["Python threads"]) == (1, 1)
    assert grown.get("open files", 1) == grown.get("threads of the process", 1) == 1
    assert 8000 < grown.get("heap in use, KiB", 8192) < 8400
    del kept


def test_every_place_is_visited_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record knows the micro-batch of a row, and fires its fault once."""
    record = Record([2, 1, 3], {Place("a", "forward", 2): "ValueError"})
    assert [record.micro_batch_of(row) for row in range(6)] == [0, 0, 1, 2, 2, 2]
    record.visit(Place("a", "forward", 1))
    with pytest.raises(ValueError, match="planned"):
        record.visit(Place("a", "forward", 2))
    record.visit(Place("a", "forward", 2))
    assert record.visits[Place("a", "forward", 2)] == 2
    with record.watching():
        pass
    record.visit(Place("a", "backward", 0))
    assert record.late == [Place("a", "backward", 0)]


def slightly_off(pipe: GPipe, *args: Any, **kwargs: Any) -> Tensor:
    """Return an output whose gradients are off by a millionth."""
    output: Tensor = FORWARD(pipe, *args, **kwargs)
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * (1 + 1e-6))
    return output


FORWARD = GPipe.forward


def without_notes(failures: Failures, action: Any, error: BaseException) -> None:
    """Keep a failure, and do not say where it was."""
    failures._failures.append((action, error))


HARMS = {
    "gradient": (GPipe, "forward", slightly_off),
    "notes": (Failures, "add", without_notes),
}


@pytest.mark.parametrize("what", HARMS)
def test_soak_notices_what_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small error in gradients, or a fault without its place, ends it, with the step's number."""
    monkeypatch.setattr(*HARMS[what])
    with pytest.raises(SoakError, match=rf"(?s)step \d+ of seed 1 failed.*{what}.*--first \d+"):
        soak(100, seed=1)


def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script ends with 0 if all is well, with 1 if something grew or a step failed."""
    script = runpy.run_path(str(FOLDER / "make.py"))
    monkeypatch.setattr(sys, "argv", ["make.py", "--steps", "3"])
    monkeypatch.setattr(tables, "FEWEST_TO_JUDGE", 1)
    threads = torch.get_num_threads()
    monkeypatch.setattr(tables, "is_passed", lambda record: True)
    assert script["main"]() == 0
    monkeypatch.setattr(tables, "is_passed", lambda record: False)
    assert script["main"]() == 1
    assert "SOMETHING GREW" in capsys.readouterr().out
    monkeypatch.setattr(GPipe, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script["main"]()
    torch.set_num_threads(threads)


def test_few_steps_do_not_tell_whether_something_grew() -> None:
    """Their first quarter still makes what is there once."""
    grown = {"name": "Python objects", "first": 1.0, "last": 1e6, "bound": 300.0}
    few = tables.FEWEST_TO_JUDGE - 1
    assert tables.is_passed({"steps": few, "growth": [grown]})
    assert not tables.is_passed({"steps": few + 1, "growth": [grown]})


@pytest.mark.slow
def test_a_hang_ends_the_process() -> None:
    """A step that does not end is shown with the stacks of all threads, and the status is not 0."""
    program = (
        f"import sys, threading; sys.path[:0] = {[str(FOLDER), str(FOLDER.parent)]!r}\n"
        "from soak_benchmark import layers, slots, soak\n"
        "layers.Dense.work = lambda self, value: threading.Event().wait()\n"
        "slots.Slot.warm_up = lambda self: None\n"
        "soak.soak(5, hang_after=1.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "gpipebal-partition" in done.stderr or "worker.py" in done.stderr
