"""Pipelines of several processes, and layers that talk to other processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from two_processes import run_two

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "training.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch has no gloo",
)

#: Stands in front of the last line of the page's script.
CHECK = """
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
losses = []
for rank in range(2):
    torch.manual_seed(1 + rank)
    images, target = torch.randn(32, 8), torch.randint(4, (32,))
    losses.append(nn.functional.cross_entropy(plain(images), target))
(sum(losses) / 2).backward()
for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(mine.grad, theirs.grad)
print("averaged")
"""

REFUSED = """
from torch.nn.parallel import DistributedDataParallel as DDP

def refused(make, words):
    try:
        make()
    except gb.GpipebalError as error:
        assert words in str(error), error
        assert "Fix: " in str(error)
    else:
        raise AssertionError(f"not refused: {words}")

def layers():
    torch.manual_seed(0)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)]

# A layer that is replicated by itself: right where each of its graphs goes back before the next.
x, both = torch.ones(4, 3) * (1 + dist.get_rank()), []
plain = nn.Sequential(*layers())
((plain(torch.ones(4, 3)).sum() + plain(torch.ones(4, 3) * 2).sum()) / 2).backward()
expected = plain[0].weight.grad

def gradient(chunks, checkpoint, schedule, group=None):
    one, *others = layers()
    model = nn.Sequential(DDP(one, process_group=group), *others)
    pipe = gb.GPipe(model, [1, 2], chunks=chunks, checkpoint=checkpoint)
    if schedule is None:
        pipe(x).sum().backward()
    else:
        pipe.step(x, loss_fn=torch.sum, reduction="sum", schedule=schedule)
    return one.weight.grad

for case in [
    (1, "never", None),
    (1, "always", "gpipe"),
    (2, "except_last", None),
    (2, "always", "1f1b"),
]:
    torch.testing.assert_close(gradient(*case), expected, msg=str(case))
words = "layer '0' is wrapped by DistributedDataParallel, and several"
refused(lambda: gradient(2, "never", None), words)
refused(lambda: gradient(4, "except_last", "1f1b"), words)
alone = dist.new_group([0]), dist.new_group([1])
gradient(2, "never", None, alone[dist.get_rank()])

# The pipeline itself: more than one gradient for each parameter.
pipe = gb.GPipe(nn.Sequential(*layers()), [1, 2], chunks=2)
around = DDP(pipe)
words = "around a pipeline with several micro-batches: chunks=2"
refused(lambda: around(x), words)
# A group of one process sends nothing, but counts gradients all the same.
refused(lambda: DDP(pipe, process_group=alone[dist.get_rank()])(x), words)
fixed = gb.GPipe(nn.Sequential(*layers()), [1, 2], chunks=2)
static = DDP(fixed, process_group=alone[dist.get_rank()], static_graph=True)
static(x).sum().backward()
mine = nn.Sequential(*layers())
mine(x).sum().backward()
torch.testing.assert_close(fixed[0].weight.grad, mine[0].weight.grad)
with torch.no_grad():
    expected = around(x)
with around.no_sync():
    torch.testing.assert_close(around(x), expected)
around.eval()
torch.testing.assert_close(around(x), expected)
single = DDP(gb.GPipe(nn.Sequential(*layers()), [1, 2]))
single(x).sum().backward()
torch.testing.assert_close(single.module[0].weight.grad, plain[0].weight.grad)
# One that is not trained, in front of what is.
frozen = gb.GPipe(nn.Sequential(*layers()), [1, 2], chunks=2).requires_grad_(False)
DDP(nn.Sequential(frozen, nn.Linear(4, 1)))(x).sum().backward()

# Normalisation over all processes, in two partitions and in one.
def norms(*groups):
    return nn.Sequential(*[nn.SyncBatchNorm(4, process_group=group) for group in groups])

y, words = torch.ones(4, 4), "in one group: layer '0' of partition 0 and layer '1' of partition 1"
refused(lambda: gb.GPipe(norms(None, None), [1, 1], chunks=2)(y), words)
refused(lambda: gb.GPipe(norms(None, None), [1, 1], checkpoint="always")(y), words)
gb.GPipe(norms(None, None).eval(), [1, 1], chunks=2)(y)
for groups, balance, chunks in [
    ((None, None), [1, 1], 1),
    ((None, None), [2], 2),
    ((dist.new_group(), dist.new_group()), [1, 1], 2),
]:
    try:
        gb.GPipe(norms(*groups), balance, chunks=chunks)(y)
    except ValueError as error:  # torch's own, behind the check: not on a CPU
        assert "expected input tensor to be on" in str(error), error
print("refused")
"""

OWN_GROUPS = """
from torch.distributed.nn.functional import all_reduce

class Centre(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return x - all_reduce(x.mean(0), group=self.group) / 2

def model(*groups):
    torch.manual_seed(0)
    one, two = map(Centre, groups)
    return nn.Sequential(nn.Linear(6, 8), one, nn.Tanh(), nn.Linear(8, 8), two, nn.Linear(8, 3))

whole = dist.group.WORLD
torch.manual_seed(1 + dist.get_rank())
x = torch.randn(8, 6)
plain = model(whole, whole)
expected = torch.cat([plain(part) for part in x.chunk(4)])
expected.square().sum().backward()
for mode in ("never", "always"):
    pipe = gb.GPipe(model(dist.new_group(), dist.new_group()), [3, 3], chunks=4, checkpoint=mode)
    for _ in range(5):
        pipe.zero_grad()
        output = pipe(x)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
print("talked")
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """Run all scripts in one pair of processes: to start them takes longer than what they do."""
    (code,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        if "all_reduce" in block
    ]
    last = "dist.destroy_process_group()\n"
    assert code.endswith(last)
    return run_two("".join([code.removesuffix(last), CHECK, REFUSED, OWN_GROUPS, last]))


def test_gradients_of_several_processes_are_averaged(said: list[str]) -> None:
    """The lines of the guide give the plain model's gradients over all the data."""
    assert all("averaged" in out for out in said)


def test_what_other_processes_would_not_follow_is_refused(said: list[str]) -> None:
    """Replicated layers and pipelines, and normalisations in two partitions; what works does."""
    assert all("refused" in out for out in said)


def test_layers_may_talk_to_other_processes_in_groups_of_their_partition(said: list[str]) -> None:
    """Numbers are the plain model's, in every mode."""
    assert all("talked" in out for out in said)
