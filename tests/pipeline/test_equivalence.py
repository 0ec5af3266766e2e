"""Any chain, cut and run in any way, gives what the plain model gives over the micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, given, settings
from random_chains import RANDOM, WIDTH, Case, Run, build, cases, is_inexact
from torch import Tensor, nn

from gpipebal.errors import PipelineError
from gpipebal.pipeline import GPipe, gather, scatter
from gpipebal.pipeline.randomness.randomness import OwnRandomness
from gpipebal.pipeline.randomness.seeds import draw_seed

pytestmark = pytest.mark.timeout(60)

#: Largest difference, as a share of the largest value, or of 1 if that is larger; of gradients, of
#: the largest of all. What is compared
#: differs only by the order of sums; batch normalisation makes more of small differences.
TOLERANCES = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.bfloat16: 0.1,
}


def make_inputs(case: Case, run: Run, device: str) -> tuple[Any, Any]:
    """Make a mini-batch on a device, and its in_dims."""
    x = torch.randn(run.rows, WIDTH, dtype=case.dtype).to(device).requires_grad_(run.input_grad)
    whole = torch.arange(run.rows, device=device) % 5
    if case.inputs == "tokens":
        return whole, 0
    if case.inputs == "tree":
        return {"x": x, "n": whole, "k": 3, "none": None}, 0
    if case.inputs == "replicated":
        whole = torch.ones(WIDTH, dtype=case.dtype, device=device)
        return (x, whole.requires_grad_(run.input_grad)), (0, None)
    return x, 0


def copy_of(inputs: Any) -> Any:
    """Copy a mini-batch, with tensors that have a gradient of their own."""
    return pytree.tree_map(
        lambda x: (
            x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        ),
        inputs,
    )


def leaves_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors of a pytree that need a gradient."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]


class Plain:
    """The plain model, over the micro-batches that a pipeline makes.

    Deferred batch normalisation is stated here in its own way: the statistics of all rows of the
    mini-batch at once, from the inputs that the layers had.
    """

    def __init__(self, model: nn.Sequential, deferred: bool) -> None:
        self.model = model
        self._norms = {
            module: []
            for module in model.modules()
            if deferred and isinstance(module, nn.modules.batchnorm._BatchNorm)
        }
        for module in self._norms:
            module.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._norms[module].append(args[0].detach().double())

    def run(self, inputs: Any, dims: Any, chunks: int) -> Any:
        buffers = copy.deepcopy(self.model.state_dict())
        for kept in self._norms.values():
            kept.clear()
        outputs = []
        seed = draw_seed()
        for i, part in enumerate(scatter(inputs, chunks, dims)):
            # A copy, because a view of a leaf cannot be written to.
            value = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, part)
            randomness = OwnRandomness(seed, i)
            with randomness.watching():
                for k, layer in enumerate(self.model):
                    randomness.enter_layer(k)
                    value = layer(value)
            outputs.append(value)
        if self.model.training:
            for name, module in self.model.named_modules():
                if module in self._norms:
                    self._defer(module, name, buffers)
        return gather(outputs)

    def _defer(self, module: Any, name: str, before: dict[str, Tensor]) -> None:
        rows = torch.cat(self._norms[module]).transpose(0, 1).flatten(1)
        dtype = module.running_mean.dtype
        module.num_batches_tracked.copy_(before[f"{name}.num_batches_tracked"] + 1)
        momentum = module.momentum or 1 / module.num_batches_tracked.item()
        for seen, kind in ((rows.mean(1), "running_mean"), (rows.var(1), "running_var")):
            old = before[f"{name}.{kind}"].double()
            # Not written to in place: the backward of torch's batch normalisation has the old one.
            setattr(module, kind, (old + momentum * (seen - old)).to(dtype))


def loss_of(output: Any, weights: Tensor, mean: bool) -> Tensor:
    """Return the sum of the squares of everything in an output, or their sum per row."""
    terms = [
        (leaf.abs().square().flatten(1).sum(1) * weights.to(leaf.device)).sum()
        / (len(leaf) if mean else 1)
        for leaf in pytree.tree_leaves(output)
        if is_inexact(leaf)
    ]
    return torch.stack(terms).sum()


def check(case: Case, devices: list[str] | None = None) -> None:
    """Run all mini-batches of a case through a pipeline and through the plain model.

    The partitions are on the CPU, or on the devices given. The plain model is where all of them
    are, if they are on one device, and otherwise on the CPU.
    """
    devices = devices or ["cpu"] * len(case.balance)
    place = devices[0] if len(set(devices)) == 1 else "cpu"
    model = build(case.layers).to(case.dtype)
    plain = Plain(copy.deepcopy(model).to(place), case.deferred)
    pipe = GPipe(
        model,
        case.balance,
        devices=devices,
        deferred_batch_norm=case.deferred,
        in_dims=(0, None) if case.inputs == "replicated" else 0,
    )
    assert list(pipe.state_dict()) == list(plain.model.state_dict())
    try:
        for k, run in enumerate(case.runs):
            try:
                check_run(case, run, pipe, plain, place, seed=k)
            except BaseException as error:
                error.add_note(f"in run {k}: {run}")
                raise
    finally:
        pipe.close()


def check_run(case: Case, run: Run, pipe: GPipe, plain: Plain, place: str, *, seed: int) -> None:
    """Compare one mini-batch, and what it leaves in gradients and buffers."""
    tolerance = TOLERANCES[case.dtype]
    pipe.chunks, pipe.checkpoint = run.chunks, run.modes
    for model in (pipe, plain.model):
        model.train(run.train)
        model.requires_grad_(True)
        for k in run.frozen:
            list(model)[k].requires_grad_(False)
    torch.manual_seed(seed)
    mine, dims = make_inputs(case, run, place)
    theirs, before = copy_of(mine), copy_of(mine)
    weights = torch.arange(1.0, 1 + run.rows).to(case.dtype).abs()
    with torch.set_grad_enabled(run.grad):
        state = torch.default_generator.get_state()
        expected = plain.run(theirs, dims, run.chunks)
        expected_loss = loss_of(expected, weights, run.mean)
        torch.default_generator.set_state(state)
        if run.way in ("gpipe", "1f1b"):
            loss = take_step(pipe, run, mine, weights, expected_loss.requires_grad)
        else:
            output = pipe(mine)
            assert_same_values(output, expected, tolerance)
            loss = loss_of(output, weights, run.mean)
            assert loss.requires_grad == expected_loss.requires_grad
        if not RANDOM.intersection(case.layers):
            assert torch.equal(torch.default_generator.get_state(), state)
    assert_same("the loss", loss.detach(), expected_loss.detach(), tolerance)
    if expected_loss.requires_grad:
        of_plain = [*leaves_with_gradient(theirs), *plain.model.parameters()]
        go_back(run, loss, leaves_with_gradient(mine), [])
        go_back(run, expected_loss, leaves_with_gradient(theirs), of_plain)
    for left, right in zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True):
        if isinstance(left, Tensor):
            assert_same("gradient of the input", left.grad, right.grad, tolerance)
    if run.grad:
        assert_same_values(mine, before, 0.0)
    # A small gradient may be the sum of large terms, about as large as the largest gradients.
    every = [p.grad.abs().max().item() for p in plain.model.parameters() if p.grad is not None]
    allowed = tolerance * max([1.0, *every])
    for (name, left), right in zip(pipe.named_parameters(), plain.model.parameters(), strict=True):
        assert_same(f"gradient of {name}", left.grad, right.grad, tolerance, allowed)
    for (name, left), right in zip(pipe.named_buffers(), plain.model.buffers(), strict=True):
        assert_same(name, left, right, tolerance)


def go_back(run: Run, total: Tensor, inputs: list[Tensor], apart: list[Tensor]) -> None:
    """Run the backwards of one side: one, or one that keeps the graph and another one.

    Afterwards gradients of those in `apart` lie in memory of their own. Plain torch may leave
    several in one, and adds to them in the next mini-batch as if it did not.
    """
    is_step = run.way in ("gpipe", "1f1b")
    if is_step and not apart:
        return  # the pipeline's step has done it
    keep = [True, False] if run.way == "twice" else [False]
    if run.way == "inputs" and inputs:
        found = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(inputs, found, strict=True):
            leaf.grad = gradient
    for retain_graph in keep:
        total.backward(retain_graph=retain_graph)
        for leaf in apart:
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()


def take_step(pipe: GPipe, run: Run, inputs: Any, weights: Tensor, needs_gradient: bool) -> Tensor:
    """Run a step of the pipeline; one whose loss needs no gradient is to be refused."""

    def step(inputs: Any = inputs) -> Tensor:
        return pipe.step(
            inputs,
            target=weights,
            loss_fn=lambda output, target: loss_of(output, target, run.mean),
            reduction="mean" if run.mean else "sum",
            schedule=run.way,
        )

    if needs_gradient or not run.grad:
        return step()
    before, state = copy.deepcopy(pipe.state_dict()), torch.default_generator.get_state()
    with pytest.raises(PipelineError, match="needs no gradient"):
        step()
    # Some of its forwards have run, and may have drawn, or written to buffers.
    pipe.load_state_dict(before)
    torch.default_generator.set_state(state)
    with torch.no_grad():
        return step(copy_of(inputs))


def assert_same_values(mine: Any, theirs: Any, tolerance: float) -> None:
    """Compare two pytrees: structure, and kind, value and need of a gradient of every leaf."""
    left, structure = pytree.tree_flatten(mine)
    right, expected = pytree.tree_flatten(theirs)
    assert structure == expected
    for k, (one, other) in enumerate(zip(left, right, strict=True)):
        if isinstance(other, Tensor):
            assert one.requires_grad == other.requires_grad
            assert_same(f"leaf {k}", one.detach(), other.detach(), tolerance)
        else:
            assert one == other


def assert_same(
    name: str,
    mine: Tensor | None,
    theirs: Tensor | None,
    tolerance: float,
    allowed: float = 0.0,
) -> None:
    """Compare two tensors, or two gradients, of which both may be None but not one.

    They may differ by so large a share of the largest element, or by what is `allowed` in any case.
    """
    if mine is None or theirs is None:
        assert mine is theirs, f"{name}: {mine} is not {theirs}"
        return
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
    mine = mine.to(theirs.device)
    if not is_inexact(theirs):
        assert torch.equal(mine, theirs), name
    elif mine.numel():
        limit = max(allowed, tolerance * max(1.0, theirs.abs().max().item()))
        assert (mine - theirs).abs().max().item() <= limit, f"{name}: {mine} is not {theirs}"


QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(QUICK, max_examples=200)
@given(cases())
def test_any_chain_is_the_plain_model(case: Case) -> None:
    """Outputs, gradients and buffers of some mini-batches in a row, in double precision."""
    check(case)


@settings(QUICK, max_examples=20)
@given(cases(torch.float32))
def test_any_chain_in_single_precision(case: Case) -> None:
    """The same in float32, without batch normalisation, which makes rounding errors large."""
    check(case)


@settings(QUICK, max_examples=20)
@given(cases(torch.bfloat16))
def test_any_chain_in_half_the_bits(case: Case) -> None:
    """The same in bfloat16."""
    check(case)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@settings(QUICK, max_examples=20)
@given(cases(torch.complex128))
def test_any_chain_of_complex_numbers(case: Case) -> None:
    """The same with complex parameters and inputs."""
    check(case)


class OtherOutput(GPipe):
    def forward(self, input: Any, **keywords: Any) -> Any:
        return super().forward(input, **keywords) * (1 + 1e-6)


class OtherGradient(GPipe):
    def forward(self, input: Any, **keywords: Any) -> Any:
        output = super().forward(input, **keywords)
        output.register_hook(lambda gradient: gradient * (1 + 1e-6))
        return output


class OtherBuffers(GPipe):
    def forward(self, input: Any, **keywords: Any) -> Any:
        output = super().forward(input, **keywords)
        self[2].count.add_(1)  # type: ignore[union-attr, operator]
        return output


@pytest.mark.parametrize("wrong", [OtherOutput, OtherGradient, OtherBuffers])
def test_small_differences_are_found(wrong: type[GPipe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs or gradients that are off by a millionth, or a buffer, fail the comparison."""
    case = Case(["linear", "tanh", "count"], [1, 2], [Run(4, 2, ["always", "never"])])
    check(case)
    monkeypatch.setitem(globals(), "GPipe", wrong)
    with pytest.raises(AssertionError):
        check(case)
