"""Deferred batch normalisation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from gpipebal.compat import torchgpipe as compat
from gpipebal.compat.torchgpipe.batchnorm import DeferredBatchNorm as CompatBatchNorm
from gpipebal.models.resnet import resnet
from gpipebal.pipeline import (
    DeferredBatchNorm,
    GPipe,
    convert_deferred_batch_norm,
    with_recompute,
)
from gpipebal.pipeline.layers.batchnorm import Statistics, gathering
from gpipebal.pipeline.layers.buffers import Buffers
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def reference(layer: nn.BatchNorm2d, inputs: Tensor) -> tuple[Tensor, Tensor, int]:
    """Running statistics of plain BatchNorm over the whole mini-batch, in double precision."""
    plain = copy.deepcopy(layer).double().train()
    plain(inputs.double())
    assert plain.running_mean is not None and plain.running_var is not None
    assert plain.num_batches_tracked is not None
    return plain.running_mean, plain.running_var, int(plain.num_batches_tracked)


@MODES
@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"momentum": 0.5, "eps": 1e-3}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_those_of_the_mini_batch(
    checkpoint: CheckpointMode, rows: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Running statistics are those of all rows at once, for any number of rows, in every mode."""
    model = nn.Sequential(nn.BatchNorm2d(3, **options), nn.Conv2d(3, 2, 1)).to(dtype)
    plain = copy.deepcopy(model[0])
    pipe = GPipe(model, [1, 1], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    layer = pipe[0]
    assert isinstance(layer, DeferredBatchNorm)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for seed in range(3):
        inputs = torch.randn(rows, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        inputs = inputs.to(dtype) * 2 + 1
        mean, variance, count = reference(plain, inputs)
        pipe(inputs).sum().backward()
        torch.testing.assert_close(layer.running_mean, mean.to(dtype), rtol=tolerance, atol=1e-6)
        torch.testing.assert_close(layer.running_var, variance.to(dtype), rtol=tolerance, atol=1e-6)
        assert int(layer.num_batches_tracked) == count
        plain.load_state_dict(layer.state_dict())


def test_small_deviations_around_a_large_mean_survive() -> None:
    """A mean of 1000 and a deviation of 0.01 give the right variance, not zero."""
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0).double(), nn.Identity())
    pipe = GPipe(model, [1, 1], chunks=4, deferred_batch_norm=True)
    inputs = 1000 + 0.01 * torch.randn(64, 2, dtype=torch.double)
    pipe(inputs)
    torch.testing.assert_close(pipe[0].running_var, inputs.var(dim=0), rtol=1e-6, atol=0)


@MODES
def test_outputs_and_gradients_are_the_plain_ones(checkpoint: CheckpointMode) -> None:
    """Each micro-batch is normalised by its own statistics, as plain BatchNorm does."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).double()
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [2, 1], chunks=2, checkpoint=checkpoint, deferred_batch_norm=True)
    inputs = torch.randn(4, 2, 3, 3, dtype=torch.double)
    output = pipe(inputs)
    expected = torch.cat([plain(part) for part in inputs.split(2)])
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_failed_mini_batch_leaves_nothing_behind() -> None:
    """An exception in the middle counts for nothing, and does not disturb the next mini-batch."""

    class Fail(nn.Module):
        on = True
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.on and self.calls == 3:
                raise ValueError("no")
            return x

    model = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Identity(), Fail())
    pipe = GPipe(model, [2, 1], chunks=4, deferred_batch_norm=True)
    plain = nn.BatchNorm1d(2, affine=False)
    inputs = torch.randn(8, 2)
    with pytest.raises(ValueError, match="no"):
        pipe(torch.randn(8, 2) + 5)
    model[2].on = False
    assert int(pipe[0].num_batches_tracked) == 0
    pipe(inputs)
    plain(inputs)
    torch.testing.assert_close(pipe[0].running_var, plain.running_var)


def test_eval_and_untracked_layers_are_plain() -> None:
    """In eval mode, and without running statistics, nothing is gathered."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 1], chunks=2, deferred_batch_norm=True).eval()
    inputs = torch.randn(4, 2)
    torch.testing.assert_close(
        pipe(inputs), torch.cat([plain.eval()(part) for part in inputs.split(2)])
    )
    assert int(pipe[0].num_batches_tracked) == 0


@MODES
@pytest.mark.parametrize("training", [True, False])
def test_layers_whose_statistics_were_taken_away_are_plain(
    checkpoint: CheckpointMode, training: bool
) -> None:
    """They normalise by the batch's own, also in evaluation, and track nothing."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], checkpoint=checkpoint, deferred_batch_norm=True)
    x = torch.randn(6, 3)
    for model in (plain, pipe):
        model.train(training)
        model[0].running_mean = model[0].running_var = None
    torch.testing.assert_close(pipe(x), plain(x))


def test_conversion_shares_everything_and_changes_nothing() -> None:
    """The caller's containers keep their layers; the converted ones share all they have."""
    calls: list[str] = []
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).double().eval())
    block[1].register_forward_hook(lambda *_: calls.append("hook"))
    untouched = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(block, untouched)
    converted = convert_deferred_batch_norm(model)
    assert type(block[1]) is nn.BatchNorm1d and model[0] is block
    assert converted is not model and converted[1] is untouched  # type: ignore[index]
    layer = converted[0][1]  # type: ignore[index]
    assert isinstance(layer, DeferredBatchNorm) and not layer.training
    assert layer.weight is block[1].weight and layer.running_mean is block[1].running_mean
    assert list(converted.state_dict()) == list(model.state_dict())
    layer(torch.zeros(2, 2, dtype=torch.double))
    assert calls == ["hook"]
    assert convert_deferred_batch_norm(converted) is converted
    assert convert_deferred_batch_norm(untouched) is untouched


def test_sync_batchnorm_is_left_alone() -> None:
    """A SyncBatchNorm stays what it is, with a warning."""
    layer = nn.SyncBatchNorm(2)
    with pytest.warns(UserWarning, match="SyncBatchNorm is left as it is"):
        assert convert_deferred_batch_norm(layer) is layer


@pytest.mark.parametrize("kind", [GPipe, compat.GPipe])
def test_warnings_of_layers_left_alone_name_the_callers_line(kind: Any) -> None:
    """However deep the layer is, and whichever class of pipelines it is for."""
    with pytest.warns(UserWarning, match="SyncBatchNorm is left as it is") as caught:
        convert_deferred_batch_norm(nn.Sequential(nn.Sequential(nn.SyncBatchNorm(2))))
    assert [warning.filename for warning in caught] == [__file__]
    model = nn.Sequential(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.warns(UserWarning, match="lazy batch normalisation is left") as caught:
        kind(model, [1], deferred_batch_norm=True)
    assert [warning.filename for warning in caught] == [__file__]


def test_outside_a_pipeline_it_is_plain() -> None:
    """Called on its own a deferred layer updates its statistics in every call, as plain does."""
    deferred, plain = DeferredBatchNorm(3), nn.BatchNorm1d(3)
    for _ in range(2):
        inputs = torch.randn(5, 3)
        torch.testing.assert_close(deferred(inputs), plain(inputs))
    torch.testing.assert_close(deferred.state_dict(), plain.state_dict())


def test_subclasses_are_converted_too() -> None:
    """A BatchNorm that works on one element of a tuple defers, and is pickled like any layer."""
    model = resnet((1, 1, 1, 1), 3, 4)
    n_layers = len(model)
    pipe = GPipe(
        model, [n_layers // 2, n_layers - n_layers // 2], chunks=2, deferred_batch_norm=True
    )
    pipe(torch.randn(4, 3, 32, 32)).sum().backward()
    norms = [m for m in pipe.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) > 10
    assert all(isinstance(m, DeferredBatchNorm) and int(m.num_batches_tracked) == 1 for m in norms)
    twin = pickle.loads(pickle.dumps(pipe))
    for copied in (twin, copy.deepcopy(pipe)):
        copied(torch.randn(4, 3, 32, 32))
        assert int(copied.state_dict()["bn1.num_batches_tracked"]) == 2
    assert int(pipe.state_dict()["bn1.num_batches_tracked"]) == 1


@MODES
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_rows_are_counted_and_nothing_else(
    momentum: float | None, checkpoint: CheckpointMode
) -> None:
    """A mini-batch without values leaves mean and variance where they were, as in torch."""
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum)).double()
    torch.nn.init.constant_(model[0].running_mean, 5.0)  # type: ignore[arg-type]
    plain, alone = copy.deepcopy(model), convert_deferred_batch_norm(copy.deepcopy(model))
    pipe = GPipe(model, [1], chunks=2, checkpoint=checkpoint, deferred_batch_norm=True)
    for rows in (0, 4, 0):
        inputs = torch.randn(rows, 3, 2, 2, dtype=torch.float64)
        for each in (pipe, plain, alone):
            each(inputs)
        for mine, other, theirs in zip(
            pipe.buffers(), alone.buffers(), plain.buffers(), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(other, theirs)


def test_some_micro_batches_may_have_no_values() -> None:
    """Statistics are those of the rows that reach the layer, though one micro-batch has none."""

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0] > 0]

    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    model = nn.Sequential(Positive(), nn.BatchNorm1d(2, momentum=1.0), Total()).double()
    for values in ([-1.0, -1.0, 1.0, 2.0], [1.0, 2.0, -1.0, -1.0]):
        pipe = GPipe(model, [2, 1], chunks=2, deferred_batch_norm=True, out_dims=None)
        pipe(torch.tensor(values, dtype=torch.float64).reshape(4, 1).repeat(1, 2))
        layer = pipe[1]
        assert layer.running_mean.tolist() == [1.5, 1.5]
        assert layer.running_var.tolist() == [0.5, 0.5]


def test_recomputes_of_a_mini_batch_share_copies_of_deferred_statistics() -> None:
    """A layer whose own forward may write to its buffers has a copy for each micro-batch."""

    class Reads(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + self.running_mean

    class Wraps(CompatBatchNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    layers = (nn.BatchNorm1d(3), Reads(3), CompatBatchNorm(3), Wraps(3))
    kept = []
    for layer in layers:
        modules = Modules([convert_deferred_batch_norm(nn.Sequential(layer))])
        buffers, statistics = Buffers(modules), Statistics()
        with gathering(statistics):
            # Copies of two micro-batches, and of one after the end of the mini-batch.
            copies = [*buffers.keep().copies.values(), *buffers.keep().copies.values()]
            statistics.commit()
            copies += buffers.keep().copies.values()
        kept.append(len(set(map(id, copies))))
    assert kept == [6, 9, 6, 9]


class Renorm(nn.Module):
    """A layer that also reads the running statistics, as they are before the mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None and variance is not None
        return self.norm(x) * variance.sqrt() + mean


@pytest.mark.parametrize("runs", [[], [[1, 2]]])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_recompute_reads_the_statistics_that_its_forward_read(
    checkpoint: CheckpointMode, runs: list[list[int]]
) -> None:
    """They are updated in between; gradients are the same in every mode and in runs."""
    found = []
    for mode, of_mode in (("never", []), (checkpoint, runs)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Renorm(), nn.Linear(4, 4))
        chain = with_recompute(convert_deferred_batch_norm(model), of_mode) if of_mode else model
        pipe = GPipe(chain, [3], chunks=2, checkpoint=mode, deferred_batch_norm=not of_mode)
        for _ in range(2):
            pipe(5 * torch.randn(8, 4)).square().sum().backward()
        found.append([parameter.grad for parameter in pipe.parameters()])
    torch.testing.assert_close(found[1], found[0])


class Caching(nn.Module):
    """Leaves its cache out when it is pickled, and batch normalisations too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.cache = norm, dict[str, int]()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        y: Tensor = self.norm(x)
        return y


class CachingNorm(nn.BatchNorm1d):
    """Leaves its cache out when it is pickled."""

    def __init__(self) -> None:
        super().__init__(3)
        self.cache = {"calls": 0}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def forward(self, input: Tensor) -> Tensor:
        self.cache["calls"] += 1
        return super().forward(input)


class NormedConv(nn.Conv1d):
    """Normalises what it computes."""

    def __init__(self) -> None:
        super().__init__(3, 3, 1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(input))
        return y


class OwnChain(nn.Sequential):
    """A chain that refuses to be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("not to be pickled")


@pytest.mark.parametrize(
    "layer",
    [Caching(nn.BatchNorm1d(3)), CachingNorm(), weight_norm(NormedConv())],
    ids=["module", "norm", "parametrized"],
)
def test_classes_with_their_own_way_to_be_pickled(layer: nn.Module) -> None:
    """What is converted keeps all attributes, whatever a pickle would have."""
    converted = convert_deferred_batch_norm(layer)
    assert vars(converted).keys() == vars(layer).keys()
    assert any(isinstance(one, DeferredBatchNorm) for one in converted.modules())
    assert not any(isinstance(one, DeferredBatchNorm) for one in layer.modules())
    pipe = GPipe(OwnChain(layer, nn.Flatten()), [1, 1], chunks=2, deferred_batch_norm=True)
    pipe(torch.randn(4, 3, 2)).square().sum().backward()
    assert any(
        int(one.num_batches_tracked) == 1
        for one in pipe.modules()
        if isinstance(one, DeferredBatchNorm) and one.num_batches_tracked is not None
    )


def test_runs_in_a_chain_with_its_own_way_to_be_pickled() -> None:
    """The chain that is returned has the class and the attributes of the other."""
    model = OwnChain(nn.Linear(3, 3), nn.Tanh())
    model.note = "kept"  # type: ignore[assignment]
    again = with_recompute(model, [[1]])
    assert isinstance(again, OwnChain) and again.note == "kept"
    assert again[0] is model[0] and again[1] is not model[1]
