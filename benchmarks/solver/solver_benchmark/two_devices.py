"""Balances of the planner and of other rules on two CPU partitions, timed."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmark_tools.machine import describe
from benchmark_tools.text import block, percent_or_unknown, signed, table
from benchmark_tools.turns import seconds_in_turns
from torch import nn

from gpipebal.pipeline import GPipe
from gpipebal.planner import compare_rules, evaluate, solve
from gpipebal.profile import Profile
from gpipebal.profiler import profile_model

FORMAT, VERSION = "gpipebal-solver-two-devices", 1
#: The plan, and the rules that it is compared with.
RULES = ("plan", "equal layers", "torchgpipe", "least bottleneck")
#: Partitions, and what they recompute.
_PARTITIONS, _CHECKPOINT = 2, "never"

Record = dict[str, Any]


class Trained(NamedTuple):
    """A model, with what its training steps take.

    Attributes:
        name: Its profile's name.
        profile: What it was planned from.
        net: Its layers.
        subject: Mini-batch, target, loss and optimizer, as the script of the profiles has them.
    """

    name: str
    profile: Profile
    net: nn.Sequential
    subject: Any


def models(folder: Path, timeout: float | None) -> Iterable[Trained]:
    """Build the models whose stored profiles are of a CPU, and profile them anew.

    Args:
        folder: That of the stored profiles, with the script that made them.
        timeout: Seconds for the repeats of each profile.
    """
    spec = importlib.util.spec_from_file_location("make_profiles", folder / "make.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    for stored in script.STORED:
        if stored.kind != "cpu":
            continue
        subject = script.subject_of(stored)
        torch.manual_seed(0)
        net = subject.build()
        profile = profile_model(
            net,
            subject.sample,
            device="cpu",
            chunks=script.CHUNKS,
            rows=(),
            partitions=_PARTITIONS,
            loss_fn=subject.loss_fn,
            target=subject.target,
            optimizer=subject.optimizer,
            timeout=timeout,
        )
        yield Trained(stored.name, profile, net, subject)


def measure(model: Trained, *, rounds: int) -> Record:
    """Predict what a step takes with every rule's balance, and measure it.

    Args:
        model: The model.
        rounds: How often each balance has a turn, of two timed steps.
    """
    profile = model.profile
    plan = solve(profile, _PARTITIONS, checkpoint=_CHECKPOINT)
    # The rule is slow on long chains, never endless on these.
    found = compare_rules(profile, plan, patience=600.0)
    rules = {}
    for name in RULES:
        balance = found.row(name).balance
        assert balance is not None
        again = evaluate(profile, balance, checkpoint=_CHECKPOINT)
        rules[name] = {
            "balance": list(balance),
            "makespan": again.makespan,
            "step_time": again.step_time,
        }
    balances = list(dict.fromkeys(tuple(rule["balance"]) for rule in rules.values()))
    seconds = _seconds(model, balances, profile.chunks, rounds)
    return {
        "profile": model.name,
        "n_layers": profile.n_layers,
        "rows": profile.mini_batch_rows,
        "chunks": profile.chunks,
        "rules": rules,
        "measured": [
            {"balance": list(balance), "seconds": seconds[balance]} for balance in balances
        ],
    }


def _seconds(
    model: Trained, balances: Sequence[tuple[int, ...]], chunks: int, rounds: int
) -> dict[tuple[int, ...], list[float]]:
    """Return the seconds of all steps with each balance; the balances take turns."""
    pipes = {
        balance: GPipe(
            model.net,
            list(balance),
            devices=["cpu"] * len(balance),
            chunks=chunks,
            checkpoint=_CHECKPOINT,
            threads_per_partition=1,
        )
        for balance in balances
    }
    subject = model.subject
    optimizer = subject.optimizer(model.net.parameters())

    def step(pipe: GPipe) -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        subject.loss_fn(pipe(subject.sample), subject.target).backward()
        optimizer.step()
        return time.perf_counter() - started

    ways = {balance: partial(step, pipe) for balance, pipe in pipes.items()}
    found = seconds_in_turns(ways, rounds)
    for pipe in pipes.values():
        pipe.close()
    return found


def blocks(record: Record) -> dict[str, str]:
    """Return what stands between the marks of the README."""
    return {"measured": block(_table(record)), "measured on": block(_environment(record))}


def _table(record: Record) -> str:
    """Write the table: what was predicted of every rule's balance, and what was measured."""
    lines = []
    above: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    for row in record["models"]:
        quartiles = {
            tuple(one["balance"]): np.percentile(one["seconds"], [25, 50, 75])
            for one in row["measured"]
        }
        plan = row["rules"]["plan"]
        for name in RULES:
            rule = row["rules"][name]
            low, middle, high = (1e3 * float(q) for q in quartiles[tuple(rule["balance"])])
            best = 1e3 * float(quartiles[tuple(plan["balance"])][1])
            predicted = rule["makespan"] / plan["makespan"] - 1
            above[name].append((predicted, middle / best - 1))
            step = rule["step_time"]
            lines.append(
                [
                    row["profile"] if name == "plan" else "",
                    name,
                    str(rule["balance"]),
                    f"{1e3 * rule['makespan']:.0f}",
                    signed(predicted),
                    "-" if step is None else f"{1e3 * step:.0f}",
                    f"{middle:.0f}",
                    f"{low:.0f}-{high:.0f}",
                    signed(middle / best - 1),
                ]
            )
    for name in RULES[1:]:
        predicted, measured = (fmean(column) for column in zip(*above[name], strict=True))
        lines.append(["mean", name, "", "", signed(predicted), "", "", "", signed(measured)])
    header = ["profile", "rule", "balance", "makespan, ms", "above", "step, ms", "measured, ms"]
    return table([*header, "quartiles", "above"], lines, left=(0, 1, 2))


def _environment(record: Record) -> str:
    about = record["provenance"]
    load = percent_or_unknown(about["other_load"])
    return "\n".join(
        [
            *describe(about),
            f"{about['rounds']} turns of two timed steps, after one that does not count",
            f"{about['minutes']:.1f} minutes; other programs' share of the cores: {load}",
        ]
    )
