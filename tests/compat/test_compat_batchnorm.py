"""torchgpipe's interface: deferred batch normalisation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from compat_chains import chain, inputs
from torch import Tensor, nn

from gpipebal.compat.torchgpipe import GPipe
from gpipebal.compat.torchgpipe.batchnorm import DeferredBatchNorm
from gpipebal.errors import ModelError
from gpipebal.schedule import CHECKPOINT_MODES


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("rows", [2, 7])
def test_a_pipeline_commits_once_per_mini_batch(checkpoint: str, rows: int) -> None:
    """Running statistics are the plain layer's over all rows, however many micro-batches."""
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1)).double()
    plain = copy.deepcopy(model[:2])
    pipe = GPipe(model, [1, 2], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    for _ in range(2):
        x = torch.randn(rows, 3, 2, 2, dtype=torch.double)
        pipe(x).sum().backward()
        plain(x)
    assert isinstance(pipe[1], DeferredBatchNorm) and type(model[1]) is nn.BatchNorm2d
    torch.testing.assert_close(pipe[1].state_dict(), plain[1].state_dict())


@pytest.mark.parametrize("momentum", [0.3, None])
def test_outside_a_pipeline_it_commits_at_the_last_chunk(momentum: float | None) -> None:
    """A loop over micro-batches updates the statistics at the `chunks`-th call, and not before."""
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    layer = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=3)
    for count in (1, 2):
        x = inputs(7)
        for k, part in enumerate(x.split([3, 2, 2])):
            assert int(layer.num_batches_tracked) == count - 1, k
            torch.testing.assert_close(layer(part), copy.deepcopy(plain)(part))
        plain(x)
        torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    layer.eval()
    torch.testing.assert_close(layer(x), plain.eval()(x))
    assert int(layer.num_batches_tracked) == 2


def test_conversion_is_torchgpipes_but_changes_nothing() -> None:
    """Layers are converted once for a number of chunks, inside copies of their containers."""
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3).eval()), nn.SyncBatchNorm(3))
    converted = DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=2)
    inner, synced = converted[0][0], converted[1]  # type: ignore[index]
    assert isinstance(inner, DeferredBatchNorm) and isinstance(inner, nn.BatchNorm2d)
    assert type(synced) is DeferredBatchNorm and not inner.training
    assert type(model[0][0]) is nn.BatchNorm2d and inner.weight is model[0][0].weight
    assert list(converted.state_dict()) == list(model.state_dict())
    convert = DeferredBatchNorm.convert_deferred_batch_norm
    assert convert(inner, 2) is inner and convert(converted, 2) is converted
    again = convert(inner, 1000)
    assert again is not inner and again.chunks == 1000 and convert(again, int("1000")) is again
    untracked = nn.BatchNorm2d(3, track_running_stats=False)
    assert convert(untracked, 2) is untracked
    with pytest.raises(ValueError, match="chunks=0"):
        convert(untracked, 0)


def test_one_layer_in_two_places_stays_one() -> None:
    """Conversion keeps a shared layer shared."""
    norm = nn.BatchNorm1d(3)
    converted = DeferredBatchNorm.convert_deferred_batch_norm(nn.Sequential(norm, norm), 2)
    assert converted[0] is converted[1] is not norm  # type: ignore[index]


def test_a_subclass_that_wraps_batchnorm_wraps_the_deferred_one() -> None:
    """A layer's own forward stays, and what it calls defers."""

    class Doubled(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer = DeferredBatchNorm.convert_deferred_batch_norm(Doubled(3), 2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), 2 * nn.BatchNorm1d(3)(x))
    assert isinstance(layer, Doubled) and int(layer.num_batches_tracked) == 0


@pytest.mark.parametrize("made", [DeferredBatchNorm(3, chunks=2), nn.BatchNorm1d(3)])
def test_a_copy_starts_a_new_mini_batch(made: nn.Module) -> None:
    """What half a mini-batch has gathered does not go into copies and pickles."""
    layer = DeferredBatchNorm.convert_deferred_batch_norm(made, 2)
    layer(torch.randn(4, 3))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        twin(torch.randn(4, 3))
        assert int(twin.num_batches_tracked) == 0
        twin(torch.randn(4, 3))
        assert int(twin.num_batches_tracked) == 1
    assert int(layer.num_batches_tracked) == 0


def test_torchgpipes_further_buffers_are_ignored() -> None:
    """Files with the sums of a mini-batch load strictly; ours do not have them."""
    pipe = GPipe(chain(), [1, 2], deferred_batch_norm=True)
    state = pipe.state_dict()
    state["partitions.1.norm.sum"] = state["partitions.1.norm.sum_squares"] = torch.zeros(4)
    assert str(pipe.load_state_dict(state)) == "<All keys matched successfully>"
    assert len(state) == len(pipe.state_dict()) + 2


def test_lazy_layers_stay_as_they_are() -> None:
    """They have no channels yet; the pipeline says so, and runs them."""
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.warns(UserWarning, match="a lazy batch normalisation is left as it is"):
        pipe = GPipe(model, [1], chunks=2, deferred_batch_norm=True)
    x = torch.randn(6, 3)
    torch.testing.assert_close(pipe(x)[:3], nn.BatchNorm1d(3)(x[:3]))


def test_what_would_run_the_original_is_not_converted() -> None:
    """A compiled call is left behind, and a forward of its own is refused."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].compile(backend="eager")
    plain = nn.BatchNorm1d(3)
    pipe = GPipe(model, [1], chunks=2, deferred_batch_norm=True)
    x = torch.randn(6, 3)
    pipe(x).sum().backward()
    plain(x)
    torch.testing.assert_close(pipe[0].state_dict(), plain.state_dict())
    model[0].forward = lambda x: x
    with pytest.raises(ModelError, match="whose forward was replaced"):
        GPipe(model, [1], chunks=2, deferred_batch_norm=True)


def test_what_is_no_chain_is_refused_before_anything_is_converted() -> None:
    """With the pipeline's own error."""
    with pytest.raises(ModelError):
        GPipe([nn.BatchNorm1d(3)], [1], deferred_batch_norm=True)  # type: ignore[arg-type]
