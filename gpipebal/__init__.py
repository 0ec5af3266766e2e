"""Measure a PyTorch model, split it across devices optimally, run it, and see where time went.

Modules are nouns, functions are verbs, and each verb turns one noun into the next::

    nn.Module --profile_model--> Profile --solve--> Plan --simulate--> Timeline (predicted)
                                    |                |                    |  same type, compared
                               profile.json      plan.json                |
                                                     +------GPipe--trace--> Timeline (measured)

`balance_by_time` does the first two steps for those who only want the balance, and the command
``gpipebal run`` does them all.

Importing gpipebal is cheap: names are looked up on first use, so that the parts that need no torch
(the planner, saved files, ``gpipebal --help``) never load it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipebal.balance import balance_by_size, balance_by_time, balance_cost
    from gpipebal.errors import GpipebalError, InfeasibleError, UnsupportedPlanError
    from gpipebal.pipeline import GPipe, flatten, is_checkpointing, is_recomputing, trace
    from gpipebal.plan import Plan
    from gpipebal.planner import (
        compare_rules,
        evaluate,
        select_method,
        solve,
        solve_grid,
        top_plans,
    )
    from gpipebal.problem import Device, Link, Rules
    from gpipebal.profile import Profile, match_profile
    from gpipebal.profiler import profile_model
    from gpipebal.rates import DeviceRates
    from gpipebal.schedule_comparison import compare_schedules
    from gpipebal.simulator import simulate
    from gpipebal.timeline import Timeline
    from gpipebal.verification import verify

__version__ = "0.1.0"

__all__ = [
    "Device",
    "DeviceRates",
    "GPipe",
    "GpipebalError",
    "InfeasibleError",
    "Link",
    "Plan",
    "Profile",
    "Rules",
    "Timeline",
    "UnsupportedPlanError",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "compare_rules",
    "compare_schedules",
    "evaluate",
    "flatten",
    "is_checkpointing",
    "is_recomputing",
    "match_profile",
    "profile_model",
    "select_method",
    "simulate",
    "solve",
    "solve_grid",
    "top_plans",
    "trace",
    "verify",
]

_HOMES = {
    "Device": "gpipebal.problem",
    "DeviceRates": "gpipebal.rates",
    "GPipe": "gpipebal.pipeline",
    "GpipebalError": "gpipebal.errors",
    "InfeasibleError": "gpipebal.errors",
    "Link": "gpipebal.problem",
    "Plan": "gpipebal.plan",
    "Profile": "gpipebal.profile",
    "Rules": "gpipebal.problem",
    "Timeline": "gpipebal.timeline",
    "UnsupportedPlanError": "gpipebal.errors",
    "balance_by_size": "gpipebal.balance",
    "balance_by_time": "gpipebal.balance",
    "balance_cost": "gpipebal.balance",
    "compare_rules": "gpipebal.planner",
    "compare_schedules": "gpipebal.schedule_comparison",
    "evaluate": "gpipebal.planner",
    "flatten": "gpipebal.pipeline",
    "is_checkpointing": "gpipebal.pipeline",
    "is_recomputing": "gpipebal.pipeline",
    "match_profile": "gpipebal.profile",
    "profile_model": "gpipebal.profiler",
    "select_method": "gpipebal.planner",
    "simulate": "gpipebal.simulator",
    "solve": "gpipebal.planner",
    "solve_grid": "gpipebal.planner",
    "top_plans": "gpipebal.planner",
    "trace": "gpipebal.pipeline",
    "verify": "gpipebal.verification",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        # Kept, so that the next use does not call this function again.
        globals()[name] = value
        return value
    if name in _modules():
        return import_module(f"gpipebal.{name}")
    raise AttributeError(f"module 'gpipebal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_modules()})


def _modules() -> set[str]:
    """Return the names of the modules and packages that lie in this one."""
    from pkgutil import iter_modules  # takes longer to import than all that is above

    return {found.name for found in iter_modules(__path__)} - {"__main__"}
