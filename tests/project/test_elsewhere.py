"""The guide's page on other tools: what it says to hand over, they take."""

from __future__ import annotations

import re
import sys
from itertools import accumulate, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from two_processes import run_two

import gpipebal as gb
from gpipebal.schedule import KNOWN_SCHEDULES, zero_bubble_schedule

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


#: Stands behind the page's module: layers that pass a pair on, cut between the two processes.
PAIRS = """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair):
        x, is_word = pair
        return self.layer(x).tanh() * is_word, is_word


class Begin(nn.Module):
    def forward(self, x):
        return x, x[:, :1] > 0


class End(nn.Module):
    def forward(self, pair):
        return pair[0]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(Begin(), Pair(), Pair(), Pair(), End())
x, target = torch.randn(8, 4), torch.randn(8, 4)
layers = model[3 * rank : 3 * rank + 3]
stage = PipelineStage(Stage(layers), rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
schedule.step(*((x,) if rank == 0 else ()), target=target if rank == 1 else None)
mine = [parameter.grad.clone() for parameter in layers.parameters()]
model.zero_grad()
nn.functional.mse_loss(model(x), target).backward()
for gradient, parameter in zip(mine, layers.parameters(), strict=True):
    torch.testing.assert_close(gradient, parameter.grad)
print("checked")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")
def test_stages_may_pass_a_tuple() -> None:
    """With the page's module around them, layers that pass a pair on can be cut anywhere."""
    imports = block_with("init_process_group").split("import gpipebal")[0]
    said = run_two(imports + block_with("class Stage") + PAIRS)
    assert all("checked" in out for out in said)


def test_zero_bubble_with_two_partitions_on_each_device_is_cut_as_interleaved() -> None:
    """The balance that the page says to take is as good as any, to a hundredth."""
    profile = gb.Profile.from_costs([5, 1, 2, 1, 3, 1, 1, 5, 2, 1], chunks=8)
    schedule = zero_bubble_schedule(2, 8, partitions_per_device=2)

    def makespan(plan: gb.Plan) -> float:
        return gb.simulate(plan, schedule).makespan

    best = min(
        makespan(gb.evaluate(profile, [a, b - a, c - b, 10 - c], checkpoint="never"))
        for a, b, c in combinations(range(1, 10), 3)
    )
    plan = gb.solve(profile, 4, schedule="interleaved_1f1b", checkpoint="never")
    assert makespan(plan) <= 1.01 * best


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
)
def test_the_last_three_classes_take_a_list_of_stages(name: str) -> None:
    """The page's table ends with the classes that take several stages, and says so."""
    rows = re.findall(r"^\| `(Schedule\w+)` \|", PAGE, re.MULTILINE)
    assert name in rows[-3:]
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    assert issubclass(getattr(schedules, name), schedules.PipelineScheduleMulti)
    for other in rows[:-3]:
        assert issubclass(getattr(schedules, other), schedules.PipelineScheduleSingle)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its own functions
def test_tracing_names_modules_as_the_traced_model_does() -> None:
    """A model that is no Sequential is cut by the names of its modules, their dots put back."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x

    model = Net()
    names = ["first", *(f"blocks_{k}" for k in range(4))]
    profile = gb.Profile.from_costs([1, 1, 1, 1, 1], names=names, chunks=2)
    plan = gb.solve(profile, 2, pin={"blocks_1": 0, "blocks_2": 1})
    begins = [part.layers[0].replace("blocks_", "blocks.") for part in plan.partitions]
    page = block_with("SplitPoint")
    code = re.sub(r"^begins = .*$", f"begins = {begins[1:]}", page, flags=re.MULTILINE)
    assert code != page
    given: dict[str, Any] = {"model": model, "micro_batch": torch.ones(2, 4)}
    exec(compile(code, "elsewhere.md", "exec"), given)
    assert given["pipe"].num_stages == 2
    there = [key for key, _ in given["pipe"].get_stage_module(1).named_parameters()]
    assert sorted(there) == [f"blocks.{k}.{end}" for k in (2, 3) for end in ("bias", "weight")]


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
