"""What layers and callers do beside computing: write to buffers, draw in backwards, close."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipebal.errors import BalanceError, DeviceError, ModelError, PipelineError
from gpipebal.pipeline import GPipe, is_checkpointing, is_recomputing
from gpipebal.pipeline.layers.buffers import SMALL
from gpipebal.pipeline.values.places import find_overlaps
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Observer(nn.Module):
    """Scale by the largest value seen so far, which may change at any micro-batch."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.largest: Tensor
        self.register_buffer("largest", torch.full((size,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().max() > self.largest[0]:
            self.largest.fill_(float(x.detach().max()))
        return x / self.largest[0].clone()


@MODES
def test_a_buffer_may_begin_to_change_at_any_micro_batch(checkpoint: CheckpointMode) -> None:
    """A recompute sees the buffers of its own forward, also when a later one changed them."""
    plain = nn.Sequential(nn.Linear(1, 1, bias=False), Observer()).double()
    nn.init.ones_(plain[0].weight)  # type: ignore[arg-type]
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint=checkpoint)
    inputs = torch.tensor([[1.0], [3.0], [2.0], [5.0]], dtype=torch.float64)
    run_plain(plain, inputs, 4).sum().backward()
    pipe(inputs).sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)
    assert torch.equal(pipe[1].largest, plain[1].largest)  # type: ignore[arg-type]


def test_a_large_buffer_that_begins_to_change_is_refused_once() -> None:
    """Large buffers are copied once they have changed: an error before, right numbers after."""
    plain = nn.Sequential(nn.Linear(1, 1, bias=False), Observer(SMALL)).double()
    nn.init.ones_(plain[0].weight)  # type: ignore[arg-type]
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="always")
    inputs = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    with pytest.raises(ModelError, match="buffer 'largest' of a Observer has changed"):
        pipe(inputs).sum().backward()
    for model in (plain, pipe):
        model.zero_grad()
        model[1].largest.fill_(2.0)  # type: ignore[index, operator, union-attr]
    run_plain(plain, inputs, 2).sum().backward()
    pipe(inputs).sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


class Noisy(torch.autograd.Function):
    """Add noise to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class NoisyBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(x)


@MODES
def test_random_numbers_of_a_backward_depend_on_the_seed_alone(checkpoint: CheckpointMode) -> None:
    """Workers whose backwards draw side by side get the same numbers in every run."""
    model = nn.Sequential(nn.Linear(3, 3), NoisyBackward(), nn.Linear(3, 3), NoisyBackward())
    pipe = GPipe(model, [2, 2], chunks=4, checkpoint=checkpoint)
    results = set()
    for _ in range(20):
        pipe.zero_grad()
        torch.manual_seed(1)
        pipe(torch.ones(8, 3)).sum().backward()
        results.add(tuple(pipe[0].weight.grad.flatten().tolist()))  # type: ignore[union-attr]
    assert len(results) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_inside_a_layer(reentrant: bool) -> None:
    """Without random numbers it works; with them it is refused, because it would draw others."""

    class Wrapped(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(p), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return torch_checkpoint(self.body, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(3, 3), Wrapped(0.0)).double()
    inputs = torch.randn(4, 3, dtype=torch.float64)
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="never")
    run_plain(plain, inputs, 2).sum().backward()
    pipe(inputs).sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), Wrapped(0.5)), [1, 1], chunks=2, checkpoint="never")
    with pytest.raises(ModelError, match=r"run again in a backward, by torch.utils.checkpoint"):
        pipe(torch.ones(4, 3)).sum().backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, 1:]])
def test_writing_to_shared_memory_across_a_cut_is_refused(view: Any) -> None:
    """A tensor and a view of it that cross a cut cannot be written to behind it, in any mode."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, view(x)

    class Write(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0].mul_(2).sum(1) + pair[1].sum(1)

    layers = [nn.Linear(3, 3), Two(), Write()]
    for grad in (True, False):
        pipe = GPipe(nn.Sequential(*layers), [2, 1], chunks=2)
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ModelError, match="memory is also that of"),
        ):
            pipe(torch.ones(4, 3))
        fixed = GPipe(nn.Sequential(*layers), [1, 2], chunks=2)
        with torch.set_grad_enabled(grad):
            plain = nn.Sequential(*layers)(torch.ones(4, 3))
            torch.testing.assert_close(fixed(torch.ones(4, 3)), plain)


def test_parts_of_a_tensor_may_be_written_to() -> None:
    """Views without an element in common, such as chunks, are no trouble."""
    x = torch.zeros(4, 6)
    assert find_overlaps(x.chunk(3, dim=1)) == frozenset()
    assert find_overlaps([x, 7, x[1:], torch.zeros(2)]) == {0, 2}
    assert find_overlaps([x[::2], x[1::2]]) == frozenset()

    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.chunk(2, dim=1)

    class Write(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0].mul_(2) + pair[1]

    # The plain model would be refused by torch: its parts are views of one graph.
    linear = nn.Linear(3, 4)
    pipe = GPipe(nn.Sequential(copy.deepcopy(linear), Split(), Write()), [2, 1], chunks=2)
    output, values = pipe(torch.ones(4, 3)), linear(torch.ones(4, 3))
    expected = 2 * values[:, :2] + values[:, 2:]
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, linear.weight.grad)


def test_the_output_may_be_written_to() -> None:
    """In-place operations on the pipeline's output work, and gradients flow through them."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    inputs = torch.ones(4, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(pipe(inputs).mul(3).relu().sum(), inputs)
    output = pipe(inputs)
    output.mul_(3).relu_()
    output.sum().backward()
    torch.testing.assert_close(inputs.grad, expected)


def test_inference_mode_finds_in_place_layers_too() -> None:
    """What all micro-batches share stays whole, in inference mode and after it."""

    class Bump(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] * pair[1].add_(1)

    pipe = GPipe(nn.Sequential(Bump()), [1], chunks=4, in_dims=(0, None))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert pipe((torch.ones(4), torch.zeros(1))).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("change", ["parameter", "eval", "freeze"])
def test_changes_between_forward_and_backward_are_refused(change: str) -> None:
    """A recompute that could not give what its forward gave is an error, as in the plain model."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    pipe = GPipe(model, [2, 1], chunks=2, checkpoint="always")
    loss = pipe(torch.randn(6, 3)).sum()
    if change == "parameter":
        with torch.no_grad():
            pipe[0].weight.mul_(2)  # type: ignore[operator, union-attr]
    elif change == "eval":
        pipe.eval()
    else:
        pipe[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="of partition 0 cannot be recomputed: since"):
        loss.backward()


def test_a_pipeline_inside_a_layer_of_another() -> None:
    """It runs on its own workers, and its layers know when the outer one repeats them."""
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x

    inner = GPipe(nn.Sequential(nn.Linear(2, 2), Look()), [1, 1], checkpoint="never")
    outer = GPipe(nn.Sequential(nn.Linear(2, 2), inner), [1, 1], chunks=1, checkpoint="always")
    outer(torch.ones(2, 2)).sum().backward()
    assert seen == [(True, False), (False, True)]
    assert inner[0].weight.grad is not None


def test_closing_a_pipeline_inside_itself_is_refused() -> None:
    """A layer that closes its own pipeline gets an error instead of waiting for itself."""

    class Close(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipe.close()
            return x

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), Close()), [1, 1])
    runtime = pipe._started()
    with pytest.raises(PipelineError, match="closed by one of its own layers"):
        pipe(torch.ones(2, 2))
    assert pipe._started() is runtime  # no second workers for layers that the first still run


def test_a_number_in_the_input_does_not_make_a_kind_of_its_own() -> None:
    """What is remembered of micro-batches does not grow with a counter that goes through."""

    class Count(nn.Module):
        def forward(self, pair: tuple[Tensor, int]) -> Tensor:
            return pair[0] * pair[1]

    pipe = GPipe(nn.Sequential(Count()), [1], chunks=2)
    for step in range(10):
        assert pipe((torch.ones(2), step)).tolist() == [step, step]
    (partition,) = pipe._started().partitions
    assert len(partition._facts) == 1


def test_the_sum_of_a_tied_gradient_is_added_in_place_and_told() -> None:
    """`.grad` stays the tensor that it was, and post-accumulate hooks see the sum at last."""
    layer = nn.Linear(2, 2, bias=False)
    buffer = torch.zeros(2, 2)
    layer.weight.grad = buffer
    seen: list[Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
    pipe = GPipe(nn.Sequential(layer, layer), [1, 1], chunks=2)
    pipe(torch.ones(4, 2)).sum().backward()
    assert layer.weight.grad is buffer
    assert buffer.any()
    assert torch.equal(seen[-1], buffer)


def test_sparse_and_dense_gradients_of_one_parameter() -> None:
    """A sparse embedding whose weight is the dense weight of another partition's layer."""
    for order in (0, 1):
        embedding, head = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4, bias=False)
        head.weight = embedding.weight
        plain = nn.Sequential(embedding, nn.Tanh(), head).double()
        pipe = GPipe(copy.deepcopy(plain), [2, 1], chunks=2)
        for _ in range(2 + order):
            plain(torch.arange(4)).square().sum().backward()
            pipe(torch.arange(4)).square().sum().backward()
        torch.testing.assert_close(
            pipe[0].weight.grad.to_dense(),  # type: ignore[operator, union-attr]
            plain[0].weight.grad.to_dense(),  # type: ignore[operator, union-attr]
        )


@dataclasses.dataclass
class Pair:
    """Two tensors in an object that is not a pytree."""

    x: Tensor
    y: Tensor


def test_tensors_hidden_in_objects_are_refused_at_a_cut() -> None:
    """Nobody could part, move or differentiate them; inside a partition they are no matter."""

    class Make(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Pair]:
            return x, Pair(x * 2, x)

    class Use(nn.Module):
        def forward(self, value: tuple[Tensor, Pair]) -> Tensor:
            return value[0] * value[1].x

    layers = [nn.Linear(2, 2), Make(), Use()]
    pipe = GPipe(nn.Sequential(*layers), [2, 1], chunks=2, checkpoint="always")
    with pytest.raises(
        ModelError, match=r"output of partition 0 has tensors inside .* 'x' of a Pair"
    ):
        pipe(torch.ones(4, 2))
    with pytest.raises(ModelError, match="the input has tensors inside an object"):
        pipe((torch.ones(4, 2), Pair(torch.ones(4), torch.ones(4))))
    GPipe(nn.Sequential(*layers), [1, 2], chunks=2)(torch.ones(4, 2)).sum().backward()


def test_parameters_that_were_lent_for_the_forward_are_missed_in_the_recompute() -> None:
    """`functional_call` around the forward alone is an error with checkpoints, right without."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    lent = {n: (p.detach() * 2).requires_grad_() for n, p in pipe.named_parameters()}
    output = torch.func.functional_call(pipe, lent, (torch.ones(4, 2),))
    with pytest.raises(RuntimeError, match="written to, replaced or frozen"):
        output.sum().backward()
    pipe.checkpoint = "never"
    torch.func.functional_call(pipe, lent, (torch.ones(4, 2),)).sum().backward()
    assert lent["0.weight"].grad is not None
    assert pipe[0].weight.grad is None


def test_partitions_that_recompute_nothing_may_change_before_the_backward() -> None:
    """With a mode for each, only those that recompute must stay as they are."""
    layers = [nn.Linear(2, 2), nn.Dropout(0.0), nn.Linear(2, 2), nn.Dropout(0.0)]
    pipe = GPipe(nn.Sequential(*layers), [2, 2], chunks=2, checkpoint=["always", "never"])
    outputs = [pipe(torch.ones(4, 2)).sum() for _ in range(2)]
    pipe[3].eval()
    outputs[0].backward()
    assert pipe[0].weight.grad is not None
    pipe[1].eval()
    with pytest.raises(PipelineError, match="partition 0 cannot be recomputed"):
        outputs[1].backward()


@MODES
def test_a_layer_that_becomes_in_place_is_looked_at_again(checkpoint: CheckpointMode) -> None:
    """The mini-batch in which it is noticed may fail; the next one is right."""

    class Double(nn.Module):
        in_place = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if self.in_place else x * 2

    double = Double()
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), double), [1, 1], chunks=3, checkpoint=checkpoint)
    inputs = torch.randn(6, 3)
    pipe(inputs).sum().backward()
    double.in_place = True
    with pytest.raises((RuntimeError, TypeError)):
        pipe(inputs).sum().backward()
    plain = copy.deepcopy(nn.Sequential(*pipe))
    pipe.zero_grad()
    plain.zero_grad()
    pipe(inputs).square().sum().backward()
    run_plain(plain, inputs, 3).square().sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.timeout(120)
def test_an_interrupt_of_a_layer_that_hangs_ends_the_call_and_the_process() -> None:
    """One Ctrl-C is enough, after a while of patience; the interpreter exits, the worker stays."""
    code = (
        "import os, signal, threading, torch, gpipebal as gb\n"
        "from gpipebal.pipeline.workers import tasks\n"
        "tasks.GRACE = 0.2\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Hang(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        threading.Event().wait()\n"
        "pipe = gb.GPipe(torch.nn.Sequential(Hang()), [1])\n"
        "try:\n"
        "    pipe(torch.ones(1))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_errors_name_the_argument_that_helps() -> None:
    """The fix of an error about dimensions, devices or plans is one that works."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], chunks=2)
    with pytest.raises(ModelError, match="keyword_dims for a keyword argument"):
        pipe(torch.ones(4, 2), bias=torch.ones(3))
    with pytest.raises(ModelError, match=r"(?s)target tensor cannot be divided.*target_dims"):
        pipe.step(torch.ones(4, 2), target=torch.tensor(1.0), loss_fn=lambda y, t: (y * t).sum())
    pipe.step(
        torch.ones(4, 2),
        target=torch.tensor(1.0),
        target_dims=None,
        loss_fn=lambda y, t: (y * t).sum(),
    )
    with pytest.raises(ModelError, match="is a pipeline already"):
        GPipe(pipe, [1])
    with pytest.raises(
        BalanceError, match=r"is not a list of numbers of layers: type\(balance\)=int"
    ):
        GPipe(nn.Sequential(nn.Linear(2, 2)), 1)  # type: ignore[arg-type]
    with pytest.raises(BalanceError, match="keyword_dims is not a dict"):
        GPipe(nn.Sequential(nn.Linear(2, 2)), [1], keyword_dims=3)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this machine has 0 CUDA devices"):
            GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_what_a_layer_writes_to_depends_on_what_it_is_given(checkpoint: CheckpointMode) -> None:
    """Also where it is one tensor, in containers that differ."""

    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            x = given["image"] if "image" in given else given["text"].mul_(2)
            return self.linear(x)

    plain = nn.Sequential(Pick(), nn.Linear(4, 4))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    for model in (pipe, plain):
        for name in ("image", "text", "image"):
            model({name: torch.ones(4, 4)}).sum().backward()
    torch.testing.assert_close(pipe[0].linear.weight.grad, plain[0].linear.weight.grad)


class Keeps(nn.Module):
    """Keeps its input, and writes to it in the next call."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        output = x + self.last
        self.last.fill_(7.0)
        self.last = x.detach()
        return output


def test_a_layer_that_writes_to_an_input_that_it_has_kept() -> None:
    """The error does not blame the caller for what comes from the partition before."""
    model = nn.Sequential(nn.Linear(4, 4), Keeps(), nn.Linear(4, 4))
    loss = GPipe(model, [1, 1, 1], chunks=4, checkpoint="always")(torch.ones(4, 4)).sum()
    with pytest.raises(ModelError, match=r"(?s)of partition 1 cannot .* keep a clone\(\)"):
        loss.backward()
