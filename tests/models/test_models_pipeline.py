"""Every built-in model, small, through all that gpipebal does with a model."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import SIZES, small

from gpipebal import GPipe, balance_by_size, balance_by_time, profile_model, verify
from gpipebal.errors import GpipebalError
from gpipebal.models import MODELS, gpt
from gpipebal.skip import verify_skippables

NAMES = sorted(MODELS)
SLOW = pytest.mark.slow


def test_every_model_has_a_small_size() -> None:
    """No built-in model is left out of the tests below."""
    assert sorted(SIZES) == NAMES


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_equals_plain_model(name: str, partitions: int) -> None:
    """Outputs, losses, gradients and buffers in a pipeline are those of the plain model."""
    model, sample, target, loss_fn = small(name)
    balance = _cut(len(model), partitions)
    pipe = GPipe(copy.deepcopy(model), balance, chunks=3)
    report = verify(model, pipe, sample, loss_fn=loss_fn, target=target)
    assert report


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_micro_batches_change_nothing(name: str) -> None:
    """A model that normalises each row by itself gives the whole mini-batch's gradients."""
    model, sample, target, loss_fn = small(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout2d):
            module.p = 0.0  # its draws depend on how the rows are parted
    pipe = GPipe(copy.deepcopy(model), _cut(len(model), 3), chunks=3)
    outputs = [model(sample), pipe(sample)]
    for output in outputs:
        loss_fn(output, target).backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-12)
    plain = dict(model.named_parameters())
    for key, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[key].grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_skips_pair_up(name: str) -> None:
    """Every skip is stashed once and popped once, in the model as large as it is by default."""
    with torch.device("meta"):
        verify_skippables(MODELS[name].build())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """Nothing is built that the forward does not use."""
    model, sample, target, loss_fn = small(name)
    loss_fn(model(sample), target).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", NAMES)
def test_models_are_profiled(name: str) -> None:
    """A profile has all layers by name, with their parameters."""
    model, sample, target, loss_fn = small(name, rows=4)
    profile = profile_model(
        model, sample, chunks=2, rows=(), loss_fn=loss_fn, target=target, device="cpu", timeout=0
    )
    assert [layer.name for layer in profile.layers] == [key for key, _ in model.named_children()]
    assert sum(layer.parameter_bytes for layer in profile.layers) == 8 * sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_models_are_balanced(name: str) -> None:
    """Both balances use all layers."""
    model, sample, _, _ = small(name, rows=4)
    by_time = balance_by_time(model, sample, 3, device="cpu", chunks=2, timeout=0.01)
    by_size = balance_by_size(model, sample, 3, device="cpu", chunks=2)
    assert sum(by_time) == sum(by_size) == len(model)


@pytest.mark.parametrize(
    "name", [name if name in ("unet", "gpt") else pytest.param(name, marks=SLOW) for name in NAMES]
)
def test_models_are_estimated_on_meta(name: str) -> None:
    """A model on the meta device is profiled without memory, with its skips."""
    arguments, size = SIZES[name]
    entry = MODELS[name].configure(**arguments)
    with torch.device("meta"):
        model = entry.build()
    sample = entry.make_sample(4, size, 0)
    profile = profile_model(model, sample, chunks=2, rows=(), method="estimate", rates="A100")
    assert len(profile.layers) == len(model)
    assert all(layer.forward_time >= 0 for layer in profile.layers)
    assert len(profile.skips) == (2 if name == "unet" else 0)


def test_tied_head_trains_where_partitions_share_a_device() -> None:
    """A GPT whose head is its embedding trains in a pipeline on one device as without one."""
    model = gpt(2, 16, 2, 31, 6, tie=True).double()
    assert model.head.weight is model.embedding.tokens.weight
    pipe = GPipe(copy.deepcopy(model), _cut(len(model), 2), devices=["cpu", "cpu"], chunks=2)
    tokens = torch.randint(31, (4, 6))
    verify(model, pipe, tokens)


def test_tied_head_across_devices_is_refused() -> None:
    """Partitions on different devices cannot share the embedding, and the error says so."""
    model = gpt(2, 16, 2, 31, 6, tie=True)
    with pytest.raises(GpipebalError, match=r"Fix:"):
        GPipe(model, _cut(len(model), 2), devices=["cpu", "meta"])


def _cut(n_layers: int, partitions: int) -> list[int]:
    """Return a balance of about equal counts, the last taking what is left."""
    each = n_layers // partitions
    return [each] * (partitions - 1) + [n_layers - each * (partitions - 1)]
