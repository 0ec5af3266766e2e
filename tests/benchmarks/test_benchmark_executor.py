"""benchmarks/executor: its tables say what its file holds, and what it measures is what it says."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
from benchmark_files import assert_in_readme, folder_of
from benchmark_tools.machine import package_version

from gpipebal.schedule import gpipe_schedule, make_schedule
from gpipebal.simulator import Durations

FOLDER = folder_of("executor")

from executor_benchmark import cells, measure, tables, ways, workloads  # noqa: E402
from executor_benchmark.floors import SAME_SCHEDULE, floors  # noqa: E402
from executor_benchmark.processes import Processes  # noqa: E402
from executor_benchmark.result import FORMAT, VERSION, Result  # noqa: E402

RESULTS = FOLDER / "results.json"
TINY = [workloads.tiny(workload) for workload in workloads.WORKLOADS]
FIXED = [workload for workload in TINY if not workload.random]
OURS = ("gpipebal", "gpipebal_gpipe", "gpipebal_1f1b")


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of the stored results."""
    assert_in_readme("executor", tables.blocks(Result.load(RESULTS)))
    others = tables.other_blocks([Result.load(FOLDER / name) for name in tables.OTHERS])
    assert_in_readme("executor", others, tables.OTHERS_SOURCE)
    distributed = tables.distributed_blocks(Result.load(FOLDER / tables.DISTRIBUTED))
    assert_in_readme("executor", distributed, tables.DISTRIBUTED)


def test_stored_result_is_complete() -> None:
    """The stored result has every workload, way and number of micro-batches, at full size."""
    result = Result.load(RESULTS)
    assert not result.record["provenance"]["quick"]
    for workload in workloads.WORKLOADS:
        assert result.record["workloads"][workload.name]["about"] == workload.about
        chunks = {case[1] for case in result.cases(workload.name)}
        assert chunks == set(workload.chunks)
    for case in result.cases(*(workload.name for workload in workloads.WORKLOADS)):
        # A peer may be absent, which its row says; gpipebal may not.
        assert all(result.row(case, way)["status"] == "ok" for way in OURS)
        assert all(result.efficiency(case, way) for way in OURS)


def test_stored_result_of_few_ways_is_complete() -> None:
    """Every case was compared with torch.distributed, at full size, with an interval."""
    result = Result.load(FOLDER / tables.DISTRIBUTED)
    assert not result.record["provenance"]["quick"]
    cases = result.cases(*(workload.name for workload in workloads.WORKLOADS))
    assert len(cases) == sum(len(workload.chunks) for workload in workloads.WORKLOADS)
    for case in cases:
        for way, (peer, _) in SAME_SCHEDULE.items():
            ratio = result.paired_ratio(case, way, peer)
            if (case[1], peer) == (1, "distributed_1f1b"):
                assert ratio is None
            else:
                assert ratio is not None and ratio.low <= ratio.median <= ratio.high


def test_examples_of_the_ideal_makespan() -> None:
    """The literal examples beside the formulas hold."""
    failed, tried = doctest.testmod(cells)
    assert tried and not failed


def test_loss_belongs_to_the_last_partition() -> None:
    """Without a barrier the last partition's cells have the loss in them; with one, they do not."""
    times = cells.CellTimes(
        forward=[[1.0, 3.0], [2.0, 2.0]],
        recompute=[[1.0], []],
        backward=[[3.0, 3.0], [2.0, 4.0]],
        loss_forward=[0.5, 0.5],
        loss_backward=[0.25, 0.25],
    )
    assert times.durations(loss=False) == Durations((2.0, 2.0), (1.0, 0.0), (3.0, 3.0))
    inside = times.durations(loss=True)
    assert inside == Durations((2.0, 2.5), (1.0, 0.0), (3.0, 3.25))
    # 0F0 0F1 .... .... 0B0 0B1        2 + 2.5 + 2.5 + 3.25 + 3.25 + 3 = 16.5
    schedule = gpipe_schedule(2, 2, "never")
    assert cells.ideal(schedule, inside) == 16.5


@pytest.mark.parametrize("checkpoint", ways.CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("workload", FIXED, ids=lambda workload: workload.name)
@pytest.mark.parametrize("run", [cells.run_serially, cells.run_side_by_side])
def test_cells_do_the_work_of_the_plain_model(
    run: Any, workload: workloads.Workload, schedule: str, checkpoint: Any
) -> None:
    """Cell by cell the gradients are the plain model's, and every cell is clocked once.

    Side by side they are so twice: the run that makes inputs and gradients ready adds them too.
    """
    wanted = _run(ways.make_way("plain_1", workload, [1], 4, "never"))
    model = workload.make_model()
    order = make_schedule(schedule, 2, 4, checkpoint)
    times = run([model[:1], model[1:]], order, workload.make_batch())
    n_runs = 1 if run is cells.run_serially else 2
    _assert_same([parameter.grad / n_runs for parameter in model.parameters()], wanted)
    for kind, row in (("F", times.forward), ("R", times.recompute), ("B", times.backward)):
        assert [len(clocked) for clocked in row] == [len(r) for r in order.phase(kind)]
    assert len(times.loss_forward) == len(times.loss_backward) == 4
    assert (times.pause > 0) == (n_runs == 1)


def test_failure_in_a_thread_beside_others_is_told() -> None:
    """A layer that fails in one thread ends the measurement with its own error."""
    schedule = gpipe_schedule(2, 2, "never")
    model = FIXED[0].make_model()
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) >= 2:
            raise ZeroDivisionError

    model[1].register_forward_hook(fail)
    parts = [model[:1], model[1:]]
    with pytest.raises(ZeroDivisionError):
        cells.run_side_by_side(parts, schedule, FIXED[0].make_batch())


def test_serial_cells_refuse_a_schedule_that_never_ends() -> None:
    """A schedule whose rows wait for each other is not waited for."""
    schedule = gpipe_schedule(2, 1, "never")
    stuck = type(schedule)("stuck", (schedule.rows[0][::-1], schedule.rows[1]))
    workload = FIXED[0]
    model = workload.make_model()
    parts = [model[:1], model[1:]]
    with pytest.raises(ValueError, match="never finish"):
        cells.run_serially(parts, stuck, workload.make_batch())


@pytest.mark.parametrize("checkpoint", ways.CHECKPOINTS)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("workload", FIXED, ids=lambda workload: workload.name)
def test_ways_of_gpipebal_do_the_work_of_the_plain_model(
    workload: workloads.Workload, name: str, checkpoint: str
) -> None:
    """A step of the pipeline leaves the plain model's gradients, and so does a second one."""
    wanted = _run(ways.make_way("plain_1", workload, [1], 4, "never"))
    n_layers = len(workload.make_model())
    way = ways.make_way(name, workload, [1, n_layers - 1], 4, checkpoint)
    try:
        _assert_same(_run(way), wanted)
        _assert_same(_run(way), wanted)
    finally:
        way.close()


@pytest.mark.parametrize("checkpoint", ways.CHECKPOINTS)
@pytest.mark.parametrize("peer", ["torchgpipe", "fairscale"])
def test_old_peers_do_the_work_of_the_plain_model(peer: str, checkpoint: str) -> None:
    """A step of a peer leaves the plain model's gradients, or its row says it is not installed."""
    workload = FIXED[0]
    balance = [1, len(workload.make_model()) - 1]
    if package_version(peer) is None:
        with pytest.raises(ways.NotAvailableError, match="not installed"):
            ways.make_way(peer, workload, balance, 4, checkpoint)
        return
    wanted = _run(ways.make_way("plain_1", workload, [1], 4, "never"))
    _assert_same(_run(ways.make_way(peer, workload, balance, 4, checkpoint)), wanted)


def test_plain_model_takes_its_threads_only_for_its_step() -> None:
    """The plain model's second thread is gone when the next way has its turn."""
    way = ways.make_way("plain_2", FIXED[0], [1], 4, "never")
    seen: list[int] = []
    step, way.step = way.step, lambda: (seen.append(torch.get_num_threads()), step())
    way.run()
    assert (seen, torch.get_num_threads()) == ([2], 1)


@pytest.mark.dist
@pytest.mark.slow
def test_processes_do_the_work_of_the_plain_model_and_tell_their_failures() -> None:
    """Two processes leave the plain model's gradients; one that fails is told, and not waited for.

    After a failure no question is put any more: the other process may wait for the one that failed.
    """
    workload = FIXED[1]
    wanted = _run(ways.make_way("plain_1", workload, [1], 4, "never"))
    with Processes(2) as processes:
        processes.build(workload, [4, 5], 4)
        for name in ("distributed_gpipe", "distributed_1f1b", "distributed_gpipe"):
            assert processes.run(name) > 0
            _assert_same(processes.gradients(), wanted)
        with pytest.raises(RuntimeError, match="KeyError"):
            processes.run("no such schedule")
        with pytest.raises(RuntimeError, match="KeyError"):
            processes.gradients()


@pytest.mark.parametrize("workload", TINY[2:], ids=lambda workload: workload.name)
def test_group_has_a_row_for_every_way(workload: workloads.Workload) -> None:
    """Every way has a row in every mode it has, with as many times as rounds, and an ideal."""
    rows = measure.measure_group(workload, [1, 1], 4, measure.Length(2), None)
    found = {(row["way"], row["checkpoint"]): row for row in rows if "way" in row}
    modes = {name: ways.CHECKPOINTS for name in ways.WAYS}
    modes |= {"plain_1": (None,), "plain_2": (None,)}
    modes |= {"distributed_gpipe": ("never",), "distributed_1f1b": ("never",)}
    assert set(found) == {(name, mode) for name, of_way in modes.items() for mode in of_way}
    for name in OURS:
        assert len(found[name, "never"]["seconds"]["all"]) == 2
        assert found[name, "never"]["ideal"]["median"] > 0
        assert len(found[name, "never"]["side_by_side"]["all"]) == 2
    assert found["distributed_gpipe", "never"]["status"] == "left out"


def test_group_of_some_ways_has_their_rows_alone() -> None:
    """Ways that were asked for run without the others, checkpoints and cells."""
    some = ["gpipebal_1f1b", "distributed_1f1b"]
    rows = measure.measure_group(TINY[0], [4, 4], 4, measure.Length(2), None, some)
    found = [(row["way"], row["checkpoint"], row["status"]) for row in rows]
    assert sorted(found) == [
        ("distributed_1f1b", "never", "left out"),
        ("gpipebal_1f1b", "never", "ok"),
    ]


def test_order_of_ways_changes_and_favours_no_position() -> None:
    """Two rounds that follow each other put each way as far from the start as from the end."""
    names = list(ways.WAYS)
    orders = [measure._order(names, k) for k in range(8)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    predecessors = {tuple(order[:-1][order.index("gpipebal") - 1 :][:1]) for order in orders}
    assert len(predecessors) > 2


def test_wrong_gradients_do_not_get_into_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way of gpipebal whose gradients are not the plain model's ends the benchmark."""

    def make_wrong(name: str, *arguments: Any) -> ways.Way:
        way = ways.make_way(name, *arguments)
        if name == "gpipebal":
            step = way.step
            way.step = lambda: (step(), way.gradients()[0].mul_(2))
        return way

    monkeypatch.setattr(measure, "make_way", make_wrong)
    with pytest.raises(AssertionError, match="off the plain model's"):
        measure.measure_group(FIXED[0], [4, 4], 4, measure.Length(1), None)


def test_peer_that_fails_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's failure is its row's status, and the others are measured."""

    def make_broken(name: str, *arguments: Any) -> ways.Way:
        if name == "torchgpipe":
            return ways.Way(name, torch.nn.Linear(1, 1), lambda: 1 / 0)
        return ways.make_way(name, *arguments)

    monkeypatch.setattr(measure, "make_way", make_broken)
    rows = measure.measure_group(FIXED[0], [4, 4], 1, measure.Length(1), None)
    status = {row["way"]: row["status"] for row in rows if "way" in row}
    assert status["torchgpipe"] == "failed: division by zero"
    assert status["gpipebal"] == "ok"


def _record() -> dict[str, Any]:
    """Return a small result: one workload, one case, round numbers."""

    def row(way: str, median: float, ideal: float | None = None, **more: Any) -> dict[str, Any]:
        about = {"workload": "mlp", "chunks": 4, "checkpoint": "never", "way": way, "status": "ok"}
        times = {"median": median, "q1": median - 0.01, "q3": median + 0.01, "all": [median]}
        ideals = {} if ideal is None else {"ideal": {**times, "median": ideal}}
        return {**about, "seconds": times, **ideals, **more}

    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {
            "date": "2024-01-01",
            "cpu": "a processor",
            "cores": 2,
            "system": "Linux x86_64",
            "versions": {"torch": "2.13.0", "fairscale": None},
            "rounds": 7,
            "rounds_one_partition": 21,
            "least_seconds": 60.0,
            "least_seconds_one_partition": 30.0,
            "minutes": 10.0,
            "other_load": 0.004,
        },
        "workloads": {"mlp": {"about": "a chain", "small": False, "balance": [1, 1]}},
        "results": [
            row("plain_1", 0.7, checkpoint=None),
            row("plain_2", 0.4, checkpoint=None),
            row("gpipebal", 0.5, 0.475),
            row("gpipebal_gpipe", 0.5, 0.45),
            row("gpipebal_1f1b", 0.5, 0.4),
            row("torchgpipe", 1.0, 0.475),
            {
                "workload": "mlp",
                "chunks": 4,
                "checkpoint": "never",
                "way": "fairscale",
                "status": "not installed",
            },
            row("distributed_gpipe", 0.5, 0.45),
            row("distributed_1f1b", 0.4, 0.4),
        ],
        "one_partition": [
            {
                "workload": "mlp",
                "plain_1": {"median": 1.0, "q1": 0.9, "q3": 1.1},
                "gpipebal": {"median": 1.25, "q1": 1.2, "q3": 1.3},
            }
        ],
    }


def test_floors_are_evaluated_on_both_sides_of_their_limits() -> None:
    """Every floor has the value that the times give, and says whether it is reached."""
    found = {floor.name: floor for floor in floors(Result(_record()))}
    values = {name: (floor.value, floor.reached) for name, floor in found.items()}
    assert values["efficiency of loss(pipe(x)), mean"] == (pytest.approx(0.95), True)
    assert values["efficiency of step('gpipe'), mean"] == (pytest.approx(0.9), False)
    assert values["efficiency of step('gpipe'), worst"] == (pytest.approx(0.9), True)
    assert values["efficiency of step('1f1b'), worst"] == (pytest.approx(0.8), False)
    assert values["torchgpipe / loss(pipe(x)), mean"] == (pytest.approx(2.0), True)
    assert values["step('gpipe') / torch.distributed GPipe, worst"] == (1.0, True)
    assert values["step('1f1b') / torch.distributed 1F1B, worst"] == (1.25, False)
    assert values["  step('1f1b') / torch.distributed 1F1B, mean"] == (pytest.approx(1.25), None)
    assert values["one partition, chunks=1, never / plain, worst"] == (1.25, False)
    assert found["step('1f1b') / torch.distributed 1F1B, worst"].where == "mlp, chunks=4, never"


def test_bare_threads_are_no_floor_but_stand_beside_them() -> None:
    """What bare threads reach stands under the efficiencies, neither reached nor missed."""
    record = _record()
    for row in record["results"]:
        if "ideal" in row:
            row["side_by_side"] = {"median": row["ideal"]["median"] / 0.75}
    found = {floor.name.strip(): floor for floor in floors(Result(record))}
    bare = found["cells of step('gpipe') in bare threads, mean"]
    assert (bare.value, bare.limit, bare.reached) == (pytest.approx(0.75), None, None)
    result = Result(record)
    assert "0.750" in tables.floors_table(result)
    case = result.cases("mlp")[0]
    assert result.attainable(case, "gpipebal_1f1b") == pytest.approx(0.75)
    assert Result(_record()).attainable(case, "gpipebal_1f1b") is None


def test_floor_that_was_not_measured_is_not_reached() -> None:
    """A floor without a value is neither reached nor missed, and the table says so."""
    record = _record()
    record["results"] = [row for row in record["results"] if row["way"] != "torchgpipe"]
    result = Result(record)
    floor = next(each for each in floors(result) if each.name.startswith("torchgpipe / loss"))
    assert (floor.value, floor.reached) == (None, None)
    line = next(row for row in tables.floors_table(result).splitlines() if "torchgpipe" in row)
    assert "not measured" in line


def test_mean_of_ratios_is_the_same_either_way_round() -> None:
    """Twice as fast in one case and half as fast in another is 1 on average."""
    record = _record()
    slow = copy.deepcopy([row for row in record["results"] if row["status"] == "ok"])
    for row in slow:
        row["chunks"] = 8
        if row["way"] == "torchgpipe":
            row["seconds"]["median"] = 0.25
    record["results"] += slow
    found = {floor.name: floor.value for floor in floors(Result(record))}
    assert found["torchgpipe / loss(pipe(x)), mean"] == pytest.approx(1.0)


def test_ratio_of_rounds_is_not_moved_by_rounds_that_are_slow_for_all() -> None:
    """Rounds are compared one by one, and the interval holds their middle."""
    record = _record()
    slow = [1.0, 3.0, 1.0, 5.0, 1.0, 2.0, 1.0, 1.0]
    of = {row["way"]: row for row in record["results"]}
    of["distributed_gpipe"]["seconds"]["all"] = slow
    more = [1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08]
    of["gpipebal"]["seconds"]["all"] = [a * b for a, b in zip(slow, more, strict=True)]
    result = Result(record)
    case = ("mlp", 4, "never")
    ratio = result.paired_ratio(case, "gpipebal", "distributed_gpipe")
    assert ratio == pytest.approx((1.045, 1.01, 1.08))
    assert result.paired_ratio(case, "gpipebal", "fairscale") is None


def test_tables_show_losses_and_absent_peers() -> None:
    """A way that is faster than ours is counted, and a peer that is not installed has a row."""
    text = tables.blocks(Result(_record()))["result"]
    lines = [line.split() for line in text.splitlines()]
    assert ["plain", "2", "thr", "loss(pipe(x))", "1", "of", "1", "1.25x"] in [
        line[:8] for line in lines
    ]
    assert ["fairscale", "loss(pipe(x))", "not", "installed"] in lines
    assert ["torchgpipe", "loss(pipe(x))", "0", "of", "1"] in lines
    assert "500.0 ±10.0" in text


def test_the_readme_gets_result_and_environment() -> None:
    """What stands between the two marks of the README comes from the result alone."""
    blocks = tables.blocks(Result(_record()))
    assert list(blocks) == ["result", "environment"]
    assert "a processor" in blocks["environment"] and "rows: 2.0 %" in blocks["environment"]


def test_other_files_are_not_taken_for_results() -> None:
    """A file of another format is refused."""
    with pytest.raises(ValueError, match="gpipebal-plan"):
        Result({"format": "gpipebal-plan", "version": 1})


def _run(way: ways.Way) -> list[torch.Tensor]:
    way.run()
    gradients = [gradient for gradient in way.gradients() if gradient is not None]
    assert len(gradients) == len(list(way.model.parameters()))
    return [gradient.clone() for gradient in gradients]


def _assert_same(found: list[torch.Tensor | None], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for ours, plain in zip(found, wanted, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)
