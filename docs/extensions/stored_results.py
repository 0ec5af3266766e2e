"""Figures for the text, computed from the stored results of the benchmarks.

A page writes ``{{ prediction_step_error }}`` where it wants one; `figures` lists them all. So no
figure is copied by hand, and measuring a benchmark anew changes every page that quotes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gpipebal.units import format_bytes, format_seconds

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: What loss(pipe(x)).backward() is called in the results of the executor.
PIPE = "gpipebal"


def figures() -> dict[str, str]:
    """Return every figure by its name, as text."""
    return {
        **_prediction(),
        **_peak_memory(),
        **_ledger(),
        **_executor(),
        **_first_run(),
        **_soak(),
        **_solver(),
        **_speed(),
        **_memory(),
    }


def _load(benchmark: str, file: str = "results.json") -> Any:
    """Read a stored result, and let the benchmark's own code be imported."""
    folder = BENCHMARKS / benchmark
    for path in (str(folder), str(BENCHMARKS)):
        if path not in sys.path:
            sys.path.insert(0, path)
    return json.loads((folder / file).read_text(encoding="utf-8"))


def percent(fraction: float) -> str:
    """Write a fraction as a percentage.

    Example:
        >>> percent(0.0312), percent(-0.5)
        ('3.1 %', '-50 %')
    """
    return f"{100 * fraction:.3g} %" if abs(fraction) >= 0.1 else f"{100 * fraction:.2g} %"


def signed(fraction: float) -> str:
    """Write a fraction as a percentage that tells over from under.

    Example:
        >>> signed(0.0312), signed(-0.5)
        ('+3.1 %', '-50 %')
    """
    return f"{'+' if fraction >= 0 else ''}{percent(fraction)}"


def times(ratio: float) -> str:
    """Write a ratio.

    Example:
        >>> times(1.5)
        '1.50'
    """
    return f"{ratio:.2f}"


def _prediction() -> dict[str, str]:
    record = _load("prediction")
    from prediction_benchmark.figures import bars

    found = {bar.name.strip(): bar.value for bar in bars(record)}
    planner = "planner's balance over best measured"
    return {
        "prediction_plans": str(len(record["rows"])),
        "prediction_models": str(len(record["models"])),
        "prediction_step_error": percent(found["step time, mean absolute error"]),
        "prediction_step_floor": percent(found["mean of a perfect prediction"]),
        "prediction_step_worst": percent(found["step time, farthest off"]),
        "prediction_step_before": percent(found["mean, by a profile of some minutes before"]),
        "prediction_memory_error": percent(found["peak memory, mean absolute error"]),
        "prediction_memory_over": signed(found["peak memory, farthest over"]),
        "prediction_memory_under": signed(found["peak memory, farthest under"]),
        "prediction_planner_mean": percent(found[f"{planner}, mean"]),
        "prediction_planner_worst": percent(found[f"{planner}, worst"]),
        "prediction_rank": f"{found['rank correlation, lowest of a model']:.2f}",
        "prediction_rank_floor": f"{found['rank of a perfect prediction']:.2f}",
    }


def _peak_memory() -> dict[str, str]:
    record = _load("peak_memory")
    from peak_memory_tables import GOAL, errors_of, errors_of_plan

    errors = [error for row in record["rows"] for error in errors_of(row)]
    planned = [error for row in record["rows"] for error in errors_of_plan(row)]
    return {
        "memory_partitions": str(len(errors)),
        "memory_within": str(sum(abs(error) <= GOAL for error in errors)),
        "memory_goal": percent(GOAL),
        "memory_worst": percent(max(errors, key=abs)),
        "memory_planned_within": str(sum(abs(error) <= GOAL for error in planned)),
        "memory_planned_over": signed(max(planned)),
        "memory_planned_under": signed(min(planned)),
    }


def _ledger() -> dict[str, str]:
    operators = _load("ledger")["operators"]
    from ledger_tables import difference

    more = [any(difference(peaks) > 0 for peaks in one["backward"]) for one in operators]
    return {
        "ledger_operators": str(len(operators)),
        "ledger_agree": str(sum(not one["backward"] for one in operators)),
        "ledger_more": str(sum(more)),
    }


def _executor() -> dict[str, str]:
    record = _load("executor")
    from executor_benchmark.floors import SAME_SCHEDULE, floors
    from executor_benchmark.result import Result

    result = Result(record)
    longer = Result(_load("executor", "results-distributed.json"))
    over = [
        ratio.median
        for case in longer.cases(*longer.workloads)
        for way, (peer, _) in SAME_SCHEDULE.items()
        if (ratio := longer.paired_ratio(case, way, peer)) is not None
    ]
    found = {floor.name: floor.value for floor in floors(result)}
    cases = result.cases(*result.workloads)
    against_all = [result.ratio(case, "plain_2", PIPE) for case in cases]
    known = [ratio for ratio in against_all if ratio is not None]
    small = {}
    for rows in (2, 4, 8):
        case = (f"small-{rows}", 8, "never")
        small[f"small_{rows}_gain"] = _ratio(result, case, "plain_1")
        # Of one micro-batch of 8, in one partition of 2.
        small[f"small_{rows}_time"] = format_seconds((result.median(case, "plain_1") or 0) / 8 / 2)
    return {
        "executor_cases": str(len(known)),
        "executor_all_cores_wins": str(sum(ratio < 1 for ratio in known)),
        "executor_all_cores_most": times(1 / min(known)),
        "executor_efficiency": percent(found["efficiency of loss(pipe(x)), mean"] or 0.0),
        "executor_distributed_least": percent(1 - min(over)),
        "executor_distributed_most": percent(max(over) - 1),
        "executor_torchgpipe": times(found["torchgpipe / loss(pipe(x)), mean"] or 0.0),
        "uniform_one_core": _ratio(result, ("mlp", 8, "never"), "plain_1"),
        "uniform_all_cores": _ratio(result, ("mlp", 8, "never"), "plain_2"),
        "uniform_recompute": _ratio(result, ("mlp", 8, "except_last"), "plain_1"),
        **small,
    }


def _ratio(result: Any, case: tuple[str, int, str], way: str) -> str:
    """Return how many times as fast as another way the pipeline is."""
    ratio = result.ratio(case, way, PIPE)
    return "not measured" if ratio is None else times(ratio)


def _first_run() -> dict[str, str]:
    figures = {}
    # The command recomputes all micro-batches but the last one unless it is told not to.
    for mode, name in (("except_last", "resnet_recompute"), ("never", "resnet")):
        one, every = _load("first_run", f"report-{mode}.json")["speedups"].values()
        figures |= {f"{name}_one_core": times(one), f"{name}_all_cores": times(every)}
    with_recomputes, without = (
        _load("first_run", f"report-{mode}.json") for mode in ("except_last", "never")
    )
    (on_one,) = (way for way in without["plain"] if way["threads"] == 1)
    return {
        **figures,
        "resnet_plain_pieces": format_seconds(median(on_one["step_times"])),
        "resnet_recompute_cost": times(with_recomputes["step_time"] / without["step_time"]),
    }


def _solver() -> dict[str, str]:
    record = _load("solver")

    def longest(n_layers: int, n_partitions: int) -> str:
        sizes = (n_layers, n_partitions)
        return format_seconds(
            max(
                row["makespan"]["seconds"]
                for row in record["times"]
                if (row["n_layers"], row["n_partitions"]) == sizes
            )
        )

    joint = {row["name"]: format_seconds(row["seconds"]) for row in record["joint"]}
    above = {
        rule: max(plan["above"][rule] for plan in record["plans"])
        for rule in ("equal layers", "equal parameters", "torchgpipe", "least bottleneck")
    }
    return {
        "solver_short": longest(200, 8),
        "solver_long": longest(10_000, 512),
        "solver_memory": joint["200 layers / 8 partitions, memory and modes"],
        "solver_auto": joint["200 layers / 8 partitions, chunks='auto' of 20"],
        "solver_profiles": str(len({plan["profile"] for plan in record["plans"]})),
        "solver_equal_layers": percent(above["equal layers"]),
        "solver_equal_parameters": percent(above["equal parameters"]),
        "solver_torchgpipe": percent(above["torchgpipe"]),
        "solver_least_bottleneck": percent(above["least bottleneck"]),
    }


def _soak() -> dict[str, str]:
    record = _load("soak")
    return {
        "soak_steps": f"{record['steps']:,}",
        "soak_faults": f"{sum(fault['times'] for fault in record['faults']):,}",
    }


def _speed() -> dict[str, str]:
    record = _load("speed")
    from speed_benchmark.tables import against_published, speed_of

    compared = against_published(record).values()
    errors = [error for of_model, _ in compared for error in of_model]
    gains = [gain for _, of_model in compared for gain in of_model]
    of_two = [
        row["measured"]["plain"][1] / row["measured"]["2"][1] for row in record["measured"].values()
    ]
    (fast,) = (row for row in record["simulated"]["resnet101"]["fast"] if row["n"] == 8)
    return {
        "speed_runs": str(len(errors)),
        "speed_error": percent(sum(map(abs, errors)) / len(errors)),
        "speed_worst": percent(max(errors, key=abs)),
        "speed_gain": percent(sum(gains) / len(gains)),
        "speed_gain_most": percent(max(gains)),
        "speed_recompute_least": times(min(of_two)),
        "speed_recompute_most": times(max(of_two)),
        "resnet_plain_whole": format_seconds(
            record["measured"]["resnet101"]["measured"]["plain"][1]
        ),
        "speed_one_host": percent(1 - speed_of(fast, "host") / speed_of(fast)),
    }


def _memory() -> dict[str, str]:
    record = _load("memory")
    from memory_benchmark.tables import GOALS, errors, on_one_device, total

    key = "amoebanetd pipeline-8"
    largest = record["full"][key]
    model = total(largest["balances"]["published"], "model")
    found = []
    for name, row in record["measured"].items():
        found += errors({"estimated": on_one_device(record, name), "counted": row["counted"]})
    return {
        "large_parameters": f"{largest['parameters'] / 1e9:.1f}",
        "large_reserved": f"{GOALS[key]:.2f} GiB",
        "large_live": format_bytes(total(largest["balances"]["published"])),
        "large_live_least": format_bytes(total(largest["balances"]["least total"])),
        "large_allocator": format_bytes(record["measured"][key]["reserved"] - model),
        "large_counted": str(len(found)),
        "large_error": percent(max(map(abs, found))),
    }
