"""verify finds what differs, and names the first difference."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from broken_layers import (
    CountCalls,
    Cut,
    Detach,
    Late,
    Named,
    Pair,
    Scale,
    Single,
    Sum,
    Wide,
    in_worker,
    numpy_noise,
)
from chains import batchnorm_chain
from torch import Tensor, nn
from torch.nn import functional as F
from verify_cases import dropouts, make, rows, tied

import gpipebal as gb
import gpipebal.compat.torchgpipe as compat
from gpipebal.errors import GpipebalError, VerificationError
from gpipebal.pipeline import GPipe, convert_deferred_batch_norm, with_recompute

pytestmark = pytest.mark.timeout(60)

IN_RECOMPUTE = "\nThe first layer with another result is '1', in the recompute of micro-batch 0."
IN_FORWARD = "\nThe first layer with another result is '1', in the forward of micro-batch 0."
NOWHERE = "\nAll layers give the same results as in the plain model."

#: By name: a layer that does something else in the recompute, and what the error says.
RECOMPUTED = {
    "recompute scales": (
        lambda: Scale(lambda: 1.5 if gb.is_recomputing() else 1.0),
        "gradient of parameter '2.weight' is off by",
        IN_RECOMPUTE,
    ),
    "recompute detaches": (Detach, "gradient of parameter '1.weight' is None", NOWHERE),
}

#: By name: a layer that makes a pipeline differ, and what the error says.
BROKEN = {
    **RECOMPUTED,
    "threads": (
        lambda: Scale(lambda: 2.0 if in_worker() else 1.0),
        r"plain model: the output is off by .*, 1 of its largest value \(expected at most .*\)",
        IN_FORWARD,
    ),
    "numpy": (lambda: Scale(numpy_noise), "the output is off by", IN_FORWARD),
    "counting in a thread": (CountCalls, "buffer '1.calls' is off by 3", NOWHERE),
    "cut off": (Cut, r"the output has requires_grad=False \(expected True\)", NOWHERE),
    "structure": (Pair, r"structure of the output is .*tuple.*\(expected .*list", IN_FORWARD),
    "another leaf": (Named, r"output leaf \['worker'\] is True \(expected False\)", IN_FORWARD),
    "dtype": (
        Single,
        r"the output has dtype torch.float32 \(expected torch.float64\)",
        IN_FORWARD,
    ),
    "shape": (Wide, r"the output has shape \(5, 2\) \(expected \(5, 3\)\)", IN_FORWARD),
    "NaN": (
        lambda: Scale(lambda: float("nan") if in_worker() else 1.0),
        "the output is off by inf, .*\n.*nan in the pipeline",
        IN_FORWARD,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pipeline_is_found_and_the_first_difference_named(name: str) -> None:
    """A layer that does something else inside a pipeline raises, and the text says what differs."""
    broken, message, layer = BROKEN[name]
    last = [] if name in ("cut off", "structure", "another leaf", "dtype", "shape") else [Scale()]
    model = nn.Sequential(Scale(), broken(), *last).double()
    pipe = GPipe(model, [1, 1 + len(last)], chunks=3, checkpoint="always")
    with pytest.raises(AssertionError, match=message) as caught:
        gb.verify(model, pipe, rows(5, 3))
    assert isinstance(caught.value, GpipebalError)
    text = str(caught.value)
    assert text.startswith("the pipeline differs from the plain model: ")
    assert "\nIn pipe(sample)." in text and f"{layer}\nFix: let every layer" in text


@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_fix_for_a_recompute_works(name: str) -> None:
    """What differs in the recompute only agrees with checkpoint='never', as the error says."""
    model = nn.Sequential(Scale(), RECOMPUTED[name][0](), Scale()).double()
    pipe = GPipe(model, [1, 2], chunks=3)
    pipe.checkpoint = "never"
    assert gb.verify(model, pipe, rows(5, 3)).gradients.count == 3


def test_the_last_layer_with_a_wrong_gradient_is_named_first() -> None:
    """A backward goes from the last layer to the first: the first difference it meets is named."""
    model = nn.Sequential(Scale(), Scale(lambda: 1 + gb.is_recomputing()), Scale()).double()
    model.requires_grad_(False)
    sample = rows(5, 3, grad=True)
    pipe = GPipe(model, [1, 2], chunks=2)
    with pytest.raises(
        VerificationError, match=r"gradient of the input is off by .*\n.*At \[\d, \d\] it"
    ):
        gb.verify(model, pipe, sample)
    model[0].weight.requires_grad_()
    with pytest.raises(VerificationError, match=r"gradient of parameter '0.weight' is off"):
        gb.verify(model, pipe, sample)
    with pytest.raises(VerificationError, match=r"gradient of input leaf \[1\] is off"):
        pair = nn.Sequential(Sum(), *model).double().requires_grad_(False)
        gb.verify(pair, GPipe(pair, [2, 2], chunks=2), (rows(5, 3), sample))


def test_a_search_that_fails_hides_nothing() -> None:
    """If no second run is possible the difference is still named, without the layer."""
    calls: list[int] = []

    def once() -> float:
        calls.append(1)
        if len(calls) > 4:
            raise OSError("no second run")
        return 2.0 if in_worker() else 1.0

    model = nn.Sequential(Scale(), Scale(once)).double().requires_grad_(False)
    with pytest.raises(VerificationError, match="the output is off by") as caught:
        gb.verify(model, GPipe(model, [1, 1], chunks=2), rows(4, 3))
    assert len(calls) > 4 and "layer with another" not in str(caught.value)


def test_a_pipeline_that_shows_its_layers_under_other_names() -> None:
    """A pipeline of torchgpipe's kind is compared by the names of the layers, too."""
    model = nn.Sequential(*dropouts().double(), nn.BatchNorm1d(2).double())
    pipe = compat.GPipe(model, [2, 4], chunks=3, deferred_batch_norm=True)
    assert "partitions.0.0.weight" in pipe.state_dict()
    report = gb.verify(model, pipe, rows(6, 3), loss_fn=lambda y: y.square().mean())
    assert (report.gradients.count, report.buffers.count) == (6, 3)
    broken = nn.Sequential(Scale(), Scale(lambda: 1 + in_worker())).double()
    with pytest.raises(
        VerificationError, match=r"the output is off by .*\nIn .*\n.* is '1', in the"
    ):
        gb.verify(broken, compat.GPipe(broken, [1, 1], chunks=2), rows(4, 3))


def test_a_schedule_in_which_gradients_differ_is_named() -> None:
    """A layer whose backward depends on the order of micro-batches differs under 1f1b only."""
    model = nn.Sequential(Scale(), Late(), Scale()).double()
    pipe = GPipe(model, [2, 1], chunks=3, checkpoint="never")
    assert gb.verify(model, pipe, rows(6, 3))
    with pytest.raises(VerificationError, match=r"\nIn pipe.step\(sample, schedule='1f1b'\)"):
        gb.verify(model, pipe, rows(6, 3), loss_fn=lambda y: y.mean())


def test_a_reduction_that_is_not_the_losss_is_found_and_its_fix_works() -> None:
    """A sum taken for a mean gives another loss in step; the error names the argument."""
    model, pipe, sample = make("dropout")
    with pytest.raises(VerificationError, match=r"the loss is off by .*\nIn pipe.step") as caught:
        gb.verify(model, pipe, sample, loss_fn=lambda y: y.square().sum())
    assert "reduction='sum'" in str(caught.value)
    gb.verify(model, pipe, sample, loss_fn=lambda y: y.square().sum(), reduction="sum")


def test_a_mean_over_what_is_not_padding_is_found_and_its_fix_works() -> None:
    """Micro-batches have different numbers of tokens; the error says what to divide by."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    pipe = GPipe(model, [1, 1], chunks=2)
    tokens = torch.ones(4, 3, dtype=torch.long)
    target = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 0, 0], [2, 0, 0]])  # 0 is padding
    n_tokens = int((target != 0).sum())

    def loss_fn(y: Tensor, t: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0, reduction=reduction)

    with pytest.raises(VerificationError, match="a sum divided by their number in the mini-batch"):
        gb.verify(model, pipe, tokens, target=target, loss_fn=loss_fn)

    def sum_over_tokens(y: Tensor, t: Tensor) -> Tensor:
        return loss_fn(y, t, "sum") / n_tokens

    gb.verify(model, pipe, tokens, target=target, loss_fn=sum_over_tokens, reduction="sum")


def test_a_random_loss_is_compared_in_the_call_alone() -> None:
    """In the call a loss draws the same numbers in both; a step cannot, and says so."""
    model, pipe, sample = make("tuples")
    with pytest.raises(VerificationError, match=r"the loss is off by .*\nIn pipe.step") as caught:
        gb.verify(model, pipe, sample, loss_fn=lambda y: (torch.rand(1) * y).mean())
    assert "without random numbers" in str(caught.value)


def other_weight(pipe: GPipe) -> None:
    """Let a layer of the pipeline have another weight, by a little."""
    with torch.no_grad():
        pipe[4].weight[0, 1] += 1e-12


def other_layer(pipe: GPipe) -> None:
    """Put another layer of the same class in the place of one."""
    pipe._modules["4"] = nn.Linear(6, 2).double()


def other_result(pipe: GPipe) -> None:
    """Put a layer with the same weights, and 1.001 times the result, in the place of one."""

    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.001

    louder = Louder(6, 2).double()
    louder.load_state_dict(pipe[4].state_dict())
    pipe._modules["4"] = louder


def other_name(pipe: GPipe) -> None:
    """Put a layer with a further parameter in the place of one."""
    pipe._modules["1"] = nn.PReLU().double()


def frozen(pipe: GPipe) -> None:
    """Freeze a parameter of the pipeline alone."""
    pipe[0].bias.requires_grad_(False)


def half(pipe: GPipe) -> None:
    """Give the pipeline's layers another precision."""
    pipe.to(torch.float32)


def shorter(pipe: GPipe) -> None:
    """Take a layer away."""
    del pipe._modules["3"]


OTHERS = {
    other_weight: r"parameter '4.weight' is off by 1e-12, .*\nBefore any run. "
    r"At \[0, 1\] it is .* in the pipeline and .* model \(torch.float64, shape \(2, 6\)\)",
    other_layer: "parameter '4.weight' is off by",
    other_result: r"the output is off by .*, 0.001 of its largest value",
    other_name: "parameter '1.weight' is in the pipeline only",
    frozen: r"parameter '0.bias' has requires_grad=False \(expected True\)",
    half: r"parameter '0.weight' has dtype torch.float32",
    shorter: r"layer 3 of the pipeline is '4' \(expected '3', as in the module\)",
}


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.__name__)
def test_another_model_in_the_pipeline_is_found(change: Callable[[GPipe], None]) -> None:
    """A pipeline whose layers are not the module's is found, down to the last bit of a weight."""
    model = dropouts().double()
    pipe = GPipe(copy.deepcopy(model), [2, 3], chunks=2)
    gb.verify(model, pipe, rows(4, 3))
    change(pipe)
    with pytest.raises(VerificationError, match=OTHERS[change]) as caught:
        gb.verify(model, pipe, rows(4, 3))
    assert "\nFix: " in str(caught.value)


def test_the_fix_for_another_state_works() -> None:
    """Loading the module's state into the pipeline lets it pass, buffers included."""
    model = batchnorm_chain().double()
    pipe = GPipe(batchnorm_chain().double(), [4, 4], chunks=2)
    model[1].running_mean.add_(1)
    with pytest.raises(VerificationError, match=r"Fix: pipe.load_state_dict\(module.state_dict"):
        gb.verify(model, pipe, rows(4, 2, 8, 8))
    pipe.load_state_dict(model.state_dict())
    gb.verify(model, pipe, rows(4, 2, 8, 8))
    pipe[1].running_mean.add_(1)
    with pytest.raises(VerificationError, match=r"buffer '1.running_mean' is off by 1"):
        gb.verify(model, pipe, rows(4, 2, 8, 8))


def test_parameters_that_are_tied_on_one_side_only_are_found() -> None:
    """A tied parameter that became two has another gradient, and is named before that."""
    model = tied().double()
    pipe = GPipe(copy.deepcopy(model), [2, 2])
    pipe[3].weight = nn.Parameter(pipe[3].weight.detach().clone())
    with pytest.raises(VerificationError, match=r"'3.weight' is in the pipeline only, or shared"):
        gb.verify(model, pipe, rows(4, 3))


class Totals(nn.Module):
    """Add up over the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class Few(nn.Module):
    """Take no more than a few rows."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) < 5
        return x * 1


def test_what_is_taken_over_the_rows_cannot_be_joined() -> None:
    """Its size is a multiple of a micro-batch's rows, so that nothing else tells."""
    model, sample = nn.Sequential(nn.Linear(3, 8), Totals()), torch.randn(12, 3)
    with pytest.raises(VerificationError, match=r"joined .* has shape \(24,\) \(expected \(8,\),"):
        gb.verify(model, GPipe(model, [1, 1], chunks=3), sample)
    assert gb.verify(model, GPipe(model, [1, 1], chunks=3, out_dims=None), sample).outputs.count
    assert gb.verify(model, GPipe(model, [1, 1], chunks=1), sample).outputs.count == 1


def test_a_model_that_cannot_have_the_mini_batch_in_one_piece() -> None:
    """Is compared micro-batch by micro-batch all the same."""
    model = nn.Sequential(nn.Linear(3, 8), Few())
    report = gb.verify(model, GPipe(model, [1, 1], chunks=3), torch.randn(12, 3))
    assert report.outputs.count == 1 and report.gradients.count == 2


def test_runs_with_deferred_statistics_are_right() -> None:
    """The plain model keeps its runs where the pipeline has deferred layers in them."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()]
    chain = with_recompute(convert_deferred_batch_norm(nn.Sequential(*layers)), [[1, 2, 3]])
    gb.verify(chain, gb.GPipe(chain, [4], chunks=2), torch.randn(8, 4))
    begun = with_recompute(convert_deferred_batch_norm(nn.Sequential(*layers)), [[2, 3]])
    gb.verify(begun, gb.GPipe(begun, [4], chunks=2), torch.randn(8, 4))


def test_the_layer_is_found_in_a_pipeline_with_runs() -> None:
    """A layer that does something else in the pipeline is named, in a run too."""

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    other = copy.deepcopy(plain)
    other[2] = Twice(4, 4)
    other.load_state_dict(plain.state_dict())
    pipe = gb.GPipe(with_recompute(other, [[1, 2]]), [4], chunks=2, checkpoint="never")
    with pytest.raises(VerificationError, match="The first layer with another result is '2'"):
        gb.verify(plain, pipe, torch.randn(8, 4))
