"""The guide's page on other tools: what it says to hand over, they take."""

from __future__ import annotations

import re
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from two_processes import run_two

import gpipebal as gb
from gpipebal.schedule import KNOWN_SCHEDULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "elsewhere.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

#: Stands in front of the last line of the script.
CHECK = """
plain = make_model()
nn.functional.cross_entropy(plain(images), target).backward()
same = plain[first : first + len(layers)]
for mine, theirs in zip(layers.parameters(), same.parameters(), strict=True):
    torch.testing.assert_close(mine.grad, theirs.grad)
print("checked")
"""


def block_with(text: str) -> str:
    """Return the one block of the page's code that has a text in it."""
    (block,) = [block for block in BLOCKS if text in block]
    return block


def test_the_table_of_schedules_is_the_known_ones() -> None:
    """Every schedule that torch runs is in the page's table, with partitions of each device."""
    rows = re.findall(r"^\| `(Schedule\w+)` \| `\"(\w+)\"` \| (\d+) \|$", PAGE, re.MULTILINE)
    known = [one for one in KNOWN_SCHEDULES.values() if one.torch is not None]
    assert sorted(rows) == sorted(
        (str(one.torch), one.name, str(one.partitions_per_device)) for one in known
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")
def test_the_script_trains_as_the_plain_model_does() -> None:
    """The script for torch.distributed.pipelining finds the plain model's gradients."""
    last = "dist.destroy_process_group()\n"
    code = block_with("init_process_group")
    assert code.endswith(last)
    said = run_two(code.removesuffix(last) + CHECK + last)
    assert all("checked" in out for out in said)
    assert re.search(r"^loss \d\.\d{3}$", said[1], re.MULTILINE)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its own functions
def test_tracing_cuts_where_the_plan_does() -> None:
    """The traced pipeline has the layers of the plan's partitions."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    profile = gb.Profile.from_costs([1, 1, 1, 1, 1], names=list(model._modules), chunks=2)
    plan = gb.solve(profile, 2, pin={"2": 0, "3": 1})
    expected = [list(model[:3].parameters()), list(model[3:].parameters())]
    names = {"plan": plan, "model": model, "micro_batch": torch.ones(2, 4)}
    exec(compile(block_with("SplitPoint"), "elsewhere.md", "exec"), names)
    pipe: Any = names["pipe"]
    assert pipe.num_stages == 2
    for j in range(2):
        shapes = [parameter.shape for parameter in pipe.get_stage_module(j).parameters()]
        assert sorted(shapes) == sorted(parameter.shape for parameter in expected[j])


def test_deepspeed_is_given_the_cuts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The subclass cuts where the plan does, by what DeepSpeed's own method sets."""

    class PipelineModule:
        def __init__(self, rank: int) -> None:
            self.global_rank = rank
            self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
            self._partition_layers(method="parameters")

        def _partition_layers(self, method: str) -> None:
            raise NotImplementedError

        def _set_bounds(self, start: int, stop: int) -> None:
            self.bounds = (start, stop)

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(
        sys.modules, "deepspeed.pipe", SimpleNamespace(PipelineModule=PipelineModule)
    )
    monkeypatch.chdir(tmp_path)
    plan = gb.solve(gb.Profile.from_costs([1, 2, 3, 4, 5], chunks=4), 2)
    plan.save("plan.json")
    names: dict[str, object] = {}
    exec(compile(block_with("PlannedModule"), "elsewhere.md", "exec"), names)
    planned = names["PlannedModule"]
    assert isinstance(planned, type)
    modules = [planned(rank) for rank in range(2)]
    bounds = [0, *accumulate(plan.balance)]
    assert [module.bounds for module in modules] == [tuple(bounds[:2]), tuple(bounds[1:])]
    assert modules[0].parts == bounds
