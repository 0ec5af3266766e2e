"""The chain: which modules a pipeline takes, and whether a balance or a plan fits them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from gpipebal.errors import BalanceError, ModelError, UnsupportedPlanError
from gpipebal.pipeline.container import Container
from gpipebal.plan import Plan
from gpipebal.profile.fingerprint import fingerprint
from gpipebal.schedule import SCHEDULES, check_count

__all__ = ["check_balance", "check_plan_names", "check_plan_schedule", "layers_of", "plan_warnings"]


def layers_of(module: nn.Module) -> OrderedDict[str, nn.Module]:
    """Return the layers of a chain by name.

    Raises:
        ModelError: `module` is not an `nn.Sequential`.
    """
    if isinstance(module, Container):
        raise ModelError(
            f"module is a pipeline already: type(module)={type(module).__name__} (expected the "
            "plain nn.Sequential).\nFix: give the model that the pipeline was made of."
        )
    if not isinstance(module, nn.Sequential):
        raise ModelError(
            "module must be nn.Sequential to be partitioned: "
            f"type(module)={type(module).__name__}.\n"
            "Fix: write the model as nn.Sequential of its layers."
        )
    return OrderedDict(
        (name, layer) for name, layer in module._modules.items() if layer is not None
    )


def check_balance(balance: Iterable[int] | None, n_layers: int) -> list[int]:
    """Return a balance as a list of ints that add up to the number of layers.

    Raises:
        BalanceError: it is missing, has an entry below 1, or has another sum.
    """
    advice = (
        "Fix: let gpipebal find it:\n"
        "    from gpipebal import balance_by_time\n"
        "    balance = balance_by_time(model, sample, partitions=2)"
    )
    if balance is None:
        raise BalanceError(f"balance is required: balance=None (expected a list).\n{advice}")
    if isinstance(balance, Plan) or not isinstance(balance, Iterable) or isinstance(balance, str):
        way = "GPipe.from_plan(model, plan)" if isinstance(balance, Plan) else "balance=[2, 3]"
        raise BalanceError(
            f"balance is no list of numbers of layers: type(balance)={type(balance).__name__} "
            f"(expected a list).\nFix: {way}."
        )
    sizes = list(balance)
    for size in sizes:
        try:
            check_count("balance", size)
        except BalanceError:
            raise BalanceError(
                f"balance has an impossible entry: balance={sizes} (expected whole numbers of 1 "
                f"or more).\n{advice}"
            ) from None
    if sum(sizes) != n_layers:
        raise BalanceError(
            f"balance does not fit the module: sum({sizes})={sum(sizes)} (expected {n_layers}, "
            f"the number of layers).\n{advice}"
        )
    return [int(size) for size in sizes]


def _name_at(names: Sequence[str], index: int) -> str:
    return repr(names[index]) if index < len(names) else "missing"


def check_plan_names(plan: Plan, names: Sequence[str]) -> None:
    """Make sure that a plan is for layers of these names.

    Raises:
        BalanceError: it is for others; the error names the first that differs.
    """
    planned = [name for partition in plan.partitions for name in partition.layers]
    if planned == list(names):
        return
    k = 0
    while k < min(len(planned), len(names)) and planned[k] == names[k]:
        k += 1
    raise BalanceError(
        f"the plan is for another model: it has {len(planned)} layers, the module has "
        f"{len(names)}; layer {k} is {_name_at(planned, k)} in the plan and "
        f"{_name_at(names, k)} in the module.\n"
        "Fix: profile this module and solve again."
    )


def check_plan_schedule(plan: Plan) -> None:
    """Make sure that the executor can run a plan's schedule.

    Raises:
        UnsupportedPlanError: it cannot; the error names what can.
    """
    if not isinstance(plan, Plan):
        raise UnsupportedPlanError(
            f"plan is no plan: type(plan)={type(plan).__name__} (expected Plan).\n"
            "Fix: plan = solve(profile, partitions), or GPipe(model, balance) with a balance."
        )
    if plan.schedule not in SCHEDULES:
        raise UnsupportedPlanError(
            f"GPipe cannot run this plan: schedule={plan.schedule!r} (expected one of "
            f"{', '.join(map(repr, SCHEDULES))}).\n"
            "Fix: plan with schedule='gpipe' or '1f1b'. Interleaved and zero-bubble schedules are "
            "run by torch.distributed.pipelining, with the plan's balance as its split points."
        )


def plan_warnings(
    plan: Plan, layers: Mapping[str, nn.Module], threads_per_partition: int
) -> Iterator[str]:
    """Say what makes the predictions of a plan doubtful for these layers and threads."""
    planned = [found for partition in plan.partitions for found in partition.fingerprints]
    changed = [
        name
        for (name, layer), found in zip(layers.items(), planned, strict=False)
        if found and found != fingerprint(layer)
    ]
    if changed:
        yield (
            f"{len(changed)} layers are not as they were profiled (the first is {changed[0]!r}): "
            "the plan's times and memory may be wrong. Fix: profile the model again."
        )
    profiled = plan.provenance.get("threads")
    if profiled is not None and profiled != threads_per_partition:
        yield (
            f"partitions have {threads_per_partition} threads each, but their layers were "
            f"profiled with {profiled}: the plan's times may be wrong. Fix: "
            f"threads_per_partition={profiled}, or profile_model(..., "
            f"threads={threads_per_partition})."
        )
