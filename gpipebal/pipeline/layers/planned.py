"""Plans: whether one fits a chain, what it adds to it, and what makes its predictions doubtful."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpipebal.argument_kinds import check_kind, check_options
from gpipebal.errors import BalanceError, KindError
from gpipebal.pipeline.layers.chain import first_difference, layers_of
from gpipebal.pipeline.layers.deferral import defer_layers
from gpipebal.pipeline.layers.modules import shallow_copy
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.layers.runs import with_recompute
from gpipebal.pipeline.process.caller import warn_caller
from gpipebal.plan import Plan
from gpipebal.profile.fingerprint import is_same_layer
from gpipebal.schedule import check_schedule
from gpipebal.units import count

__all__ = [
    "Planned",
    "check_plan",
    "check_plan_settings",
    "plan_warnings",
    "warn_of_call",
    "with_runs_of",
]


def check_plan(plan: Plan, module: nn.Module) -> None:
    """Make sure that the executor can run a plan, and that it is for this chain.

    Raises:
        KindError: it is not a plan.
        UnsupportedPlanError: its schedule cannot be run; the error names those that can.
        ModelError: `module` is no chain.
        BalanceError: it is for layers of other names; the error has the first that differs.
    """
    check_kind("plan", plan, Plan)
    check_schedule(plan.schedule)
    names = list(layers_of(module))
    difference = first_difference(plan.names, names)
    if difference is not None:
        k, planned, own = difference
        raise BalanceError(
            f"the plan is for another model: it has {count(len(plan.names), 'layer')}, the module "
            f"has {len(names)}; layer {k} is {planned} in the plan and {own} in the module.\n"
            "Fix: profile this module and solve again."
        )


def check_plan_settings(
    plan: Plan, others: Mapping[str, object], known: Mapping[str, object]
) -> None:
    """Refuse settings beside a plan that it has itself, or that there are not.

    Args:
        plan: The plan.
        others: What was given besides the settings that a plan leaves open.
        known: Those that it leaves open, by name.

    Raises:
        KindError: there is one.
    """
    own = {name: f"plan.{name}" for name in ("balance", "chunks", "checkpoint", "schedule")}
    for name, value in others.items():
        if name in own:
            given = f"{value!r:.60}"
            way = f"solve(profile, {plan.n_partitions}, {name}={given})"
            way = f"evaluate(profile, {given})" if name == "balance" else way
            use = {**own, name: given}
            other = "GPipe(model, {balance}, chunks={chunks}, checkpoint={checkpoint})"
            if name == "schedule":
                other = "pipe.step(x, target=y, loss_fn=loss_fn, schedule={schedule})"
            raise KindError(
                f"a plan has {name} of its own: {name}={given} (expected none beside a plan with "
                f"{name}={getattr(plan, name)!r:.60}).\n"
                f"Fix: {way}, whose plan has it; or {other.format(**use)}."
            )
    check_options(others, known, "GPipe.from_plan")


def with_runs_of(plan: Plan, module: nn.Module, deferred: bool) -> nn.Module:
    """Return the chain with the runs of a plan recomputed; the same chain if nothing is to add.

    Args:
        plan: The plan.
        module: The chain.
        deferred: Whether all layers of a chain with runs are to have deferred batch normalisations.

    Raises:
        BalanceError: it has other runs.
        ModelError: batch normalisation of a layer cannot be deferred.
    """
    if not plan.runs:
        return module
    layers = layers_of(module)
    own = tuple(
        range(k, k + len(layer.run))
        for k, layer in enumerate(layers.values())
        if isinstance(layer, Recomputed) and not layer.is_inside
    )
    if own and own != plan.runs:
        raise BalanceError(
            f"the module recomputes other layers than the plan: runs of {list(own)} (expected "
            f"{list(plan.runs)}).\n"
            "Fix: give the model without runs, from_plan adds those of the plan."
        )
    if deferred:
        # Layer by layer, as GPipe does: what the chain has besides its layers never runs.
        defer_layers(layers)
        module = shallow_copy(module, layers)
    if own:
        return module
    assert isinstance(module, nn.Sequential)
    return with_recompute(module, plan.runs)


class Planned:
    """What a plan counts on, and calls that train may not keep to, as far as they are not compared.

    Attributes:
        is_for_step: Whether it is only in `GPipe.step` that it keeps the memory limits it was made
            for: a caller's loss needs the outputs of all micro-batches, and all forwards before it.
            Not after a call has been warned of that.
        autocast: The kind of device that was measured and the dtype that autocast cast to there,
            None if it was off. None: nothing was measured, or on other devices than the pipeline's;
            or the first call has been compared.
    """

    def __init__(self, plan: Plan, devices: Iterable[torch.device]) -> None:
        limited = any(part.memory_limit is not None for part in plan.partitions)
        self.is_for_step = limited and (plan.loss_inside or plan.schedule != "gpipe")
        self.autocast: tuple[str, Any] | None = None
        kind = plan.provenance.get("device_type")
        is_measured = plan.provenance.get("method") == "measure"
        kinds = [device.type for device in devices if device.type == kind]
        if is_measured and kinds:
            self.autocast = kinds[0], plan.provenance.get("autocast")


def warn_of_call(pipe: Any, *, in_step: bool) -> None:
    """Warn once where a pipeline is trained in another way than its plan counts on.

    Args:
        pipe: The pipeline.
        in_step: Whether it computes the loss itself.
    """
    planned: Planned | None = pipe._planned
    if planned is None or not (pipe.training and torch.is_grad_enabled()):
        return
    if planned.is_for_step and not in_step:
        planned.is_for_step = False
        warn_caller(
            "the plan keeps its memory limit with the loss inside the pipeline, and pipe(x) leaves "
            "the loss to the caller: it may need more memory. Fix: pipe.step(x, target=y, "
            "loss_fn=loss_fn); or a plan of solve(..., schedule='gpipe', loss_inside=False).",
        )
    # Another thread's call may take it at the same time.
    measured, planned.autocast = planned.autocast, None
    if measured is not None:
        kind, then = measured
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        now = None if dtype is None else str(dtype).removeprefix("torch.")
        if now != then:
            warn_caller(
                f"the layers are trained {_under(now)}, but were profiled {_under(then)}: the "
                "plan's times and memory may be wrong. Fix: call profile_model under the "
                "torch.autocast that you train under."
            )


def _under(dtype: Any) -> str:
    return "without autocast" if dtype is None else f"under autocast to {dtype}"


def plan_warnings(
    plan: Plan,
    layers: Mapping[str, nn.Module],
    threads_per_partition: int,
    in_dims: Any,
    keyword_dims: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Say what makes the predictions of a plan doubtful for these layers, threads and rows."""
    planned = [
        found
        for partition in plan.partitions
        for found in partition.fingerprints or ("",) * len(partition.layers)
    ]
    changed = [
        name
        for (name, layer), found in zip(layers.items(), planned, strict=False)
        if is_same_layer(found, layer) is False
    ]
    if changed:
        yield (
            f"{count(len(changed), 'layer')} changed since the profile (the first is "
            f"{changed[0]!r}): the plan's times and memory may be wrong. Fix: profile the model "
            "again."
        )
    profiled = plan.provenance.get("threads")
    if profiled is not None and profiled != threads_per_partition:
        yield (
            f"partitions have {count(threads_per_partition, 'thread')} each, but their layers were "
            f"profiled with {profiled}: the plan's times may be wrong. Fix: "
            f"threads_per_partition={profiled}, or profile_model(..., "
            f"threads={threads_per_partition})."
        )
    dims = plan.provenance.get("in_dims")
    if dims and in_dims == 0:
        yield (
            f"the mini-batch is divided along dim 0, but the model was profiled with in_dims of "
            f"{dims}: other micro-batches than the plan's. Fix: "
            "GPipe.from_plan(model, plan, in_dims=..., out_dims=...), as for profile_model."
        )
    of_keywords = plan.provenance.get("keyword_dims")
    for name, dims in of_keywords.items() if isinstance(of_keywords, Mapping) else ():
        if (keyword_dims or {}).get(name, 0) == 0:
            yield (
                f"keyword argument {name!r} is divided along dim 0, but was profiled with dims of "
                f"{dims}: other micro-batches than the plan's. Fix: GPipe.from_plan(model, plan, "
                "keyword_dims=...), as for profile_model."
            )
