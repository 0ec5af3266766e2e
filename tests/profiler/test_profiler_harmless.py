"""The profiler takes layers that reach past themselves, and leaves everything as it was."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from estimate_models import Apply
from profiler.test_profiler import profile, same
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ModelError, ProfileError
from gpipebal.profiler.replicas import harmless
from gpipebal.profiler.replicas.replica import replicate

pytestmark = pytest.mark.timeout(60)

WAYS = pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])


def brief(model: nn.Module, sample: Any, **options: Any) -> gb.Profile:
    """Measure one size only."""
    return profile(model, sample, **{"rows": (), **options})


def flags_of(result: gb.Profile, what: str) -> list[str]:
    """Return the flags that say something."""
    return [flag for flag in result.provenance["flags"] if what in flag]


@WAYS
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_weight_tied_by_a_function_keeps_its_gradient(
    way: dict[str, Any], has_gradient: bool
) -> None:
    """A layer may use another one's weight through a function; its gradient is as before."""
    tied = nn.Linear(4, 4)
    model = nn.Sequential(tied, nn.ReLU(), Apply(lambda x: F.linear(x, tied.weight)))
    before = torch.ones_like(tied.weight) if has_gradient else None
    tied.weight.grad = before
    result = brief(model, torch.randn(4, 4), **way)
    assert tied.weight.grad is before
    assert before is None or bool((before == 1).all())
    assert flags_of(result, "does not register")


@WAYS
def test_statistics_reached_by_a_function_are_put_back(way: dict[str, Any]) -> None:
    """A batch normalisation that only a function knows, or only the loss, counts no batch."""
    norm, of_loss = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: norm(x)))
    brief(model, torch.randn(4, 4), loss_fn=lambda y: of_loss(y).mean(), **way)
    for each in (norm, of_loss):
        assert each.num_batches_tracked == 0
        assert same(each.running_mean, torch.zeros(4))
        assert each.weight.grad is None


class Writes(nn.Linear):
    """Writes to its weight, past the counter of versions, in every so many calls."""

    def __init__(self, every: int, *, data: bool) -> None:
        super().__init__(4, 4)
        self.every, self.data = every, data
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % self.every == 0:
            with torch.no_grad():
                (self.weight.data if self.data else self.weight).mul_(0.99)
        return super().forward(x)


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("data", [False, True])
def test_a_layer_that_writes_to_its_weight_changes_nothing(every: int, data: bool) -> None:
    """Whether a layer writes in each call or in some, seen by autograd or not, is found out."""
    model = nn.Sequential(Writes(every, data=data), nn.ReLU())
    before = model[0].weight.detach().clone()
    try:
        brief(model, torch.randn(4, 4))
    except ProfileError as error:
        assert "inplace" in str(error)  # torch may refuse to train such a layer
    assert torch.equal(model[0].weight, before)


class Keeps(nn.Module):
    """Keeps its last output, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}, {"method": "estimate"}])
def test_layers_that_keep_results_are_measured(way: dict[str, Any]) -> None:
    """What a layer keeps of an earlier forward is not an obstacle, and stays as it was."""
    model = nn.Sequential(Keeps(), nn.utils.weight_norm(nn.Linear(4, 4)))
    output = model(torch.randn(2, 4))
    kept, values = model[0].last, model[0].last.detach().clone()
    if "method" in way:
        result = gb.profile_model(model, torch.randn(4, 4), rows=(), progress=False, **way)
    else:
        result = brief(model, torch.randn(4, 4), **way)
    assert result.layers[0].output_bytes == 4 * 4 * 4
    assert model[0].last is kept and torch.equal(kept, values)
    output.sum().backward()
    assert model[0].inner.weight.grad is not None


class Locked(nn.Linear):
    """Has a lock."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.locks = {"one": threading.Lock()}

    def forward(self, x: Tensor) -> Tensor:
        with self.locks["one"]:
            return super().forward(x)


class Probe:
    """A hook that counts, and writes to a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


@WAYS
def test_what_cannot_be_copied_is_shared(way: dict[str, Any], tmp_path: Path) -> None:
    """Locks and open files are no obstacle; a hook runs in copies, and counts nothing here."""
    model = nn.Sequential(Locked(), nn.ReLU())
    probe = Probe(tmp_path / "log")
    model[0].register_forward_hook(probe)
    result = brief(model, torch.randn(4, 4), **way)
    assert result.n_layers == 2 and probe.calls == 0
    assert flags_of(result, "hooks ran") == [
        "layer '0': hooks ran while it was measured, as they do in training"
    ]
    probe.file.close()


def test_hooks_on_parameters_do_not_run_and_a_flag_says_so() -> None:
    """They act on what is the caller's: a profile counts neither their time nor their memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    calls: list[Any] = []
    model[0].weight.register_hook(calls.append)
    model[2].weight.register_post_accumulate_grad_hook(calls.append)
    result = brief(model, torch.randn(4, 4))
    assert not calls
    assert flags_of(result, "hooks on parameters") == [
        "layers '0', '2': hooks on parameters do not run in a profile; their time and memory are "
        "not counted"
    ]


def test_what_must_not_be_shared_is_refused() -> None:
    """A module that refuses to be copied is not measured itself: the error names the layer."""

    class Refuses(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not me")

    with pytest.raises(ProfileError, match="layer '0' cannot be copied: TypeError: not me"):
        brief(nn.Sequential(nn.Sequential(Refuses(4, 4))), torch.randn(4, 4))


def test_weights_of_a_recurrent_layer_are_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """So cuDNN wants them; a copy of its own is put together, shared memory stays shared."""
    flattened: list[nn.RNNBase] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: flattened.append(self))
    layer, cpu = nn.LSTM(3, 4, num_layers=2), torch.device("cpu")
    weights = list(layer.parameters())
    flattened.clear()
    (scattered,) = replicate(["layer"], [layer], cpu)
    assert flattened == [scattered]
    whole, start = torch.cat([weight.detach().flatten() for weight in weights]), 0
    for weight in weights:
        weight.data = whole[start : start + weight.numel()].view_as(weight)
        start += weight.numel()
    flattened.clear()
    (shared,) = replicate(["layer"], [layer], cpu)
    assert not flattened
    (private,) = replicate(["layer"], [nn.Sequential(layer)], cpu, private=(0,))
    assert flattened == [private[0]]  # type: ignore[index]
    for mine, theirs, copied in zip(
        shared.parameters(), weights, private.parameters(), strict=True
    ):
        assert mine.data_ptr() == theirs.data_ptr() != copied.data_ptr()


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}, {"method": "estimate"}])
def test_parts_in_evaluation_mode_are_measured_so(way: dict[str, Any]) -> None:
    """A frozen batch normalisation in a model that trains saves what it saves then."""

    def profiled(model: nn.Module) -> gb.Profile:
        given = {"rows": (), "progress": False} | ({} if "method" in way else {"timeout": 0})
        return gb.profile_model(model, torch.randn(4, 4), **given, **way)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    trained = profiled(model)
    model[1].eval()
    frozen = profiled(model)
    # The input alone; no statistics of the batch, and no mask.
    assert frozen.bytes_of(frozen.layers[1].saved) == 4 * 4 * 4
    assert trained.bytes_of(trained.layers[1].saved) > 4 * 4 * 4
    # All of a model in evaluation mode is measured as if it were trained.
    model.eval()
    whole = profiled(model)
    assert whole.bytes_of(whole.layers[1].saved) == trained.bytes_of(trained.layers[1].saved)
    assert not any(part.training for part in model.modules())


def test_a_trial_keeps_the_modes() -> None:
    """A part in evaluation mode runs so in the trial as a pipeline, and the profile says it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    result = brief(model, torch.randn(4, 4), chunks=4)  # one row: training would be refused
    assert "trial" in result.provenance
    assert flags_of(result, "evaluation") == ["layer '1': in evaluation mode, and measured so"]


def test_a_chain_with_a_forward_of_its_own_is_refused() -> None:
    """What a subclass of nn.Sequential does beside its layers would be missed."""

    class Sum(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) + self[1](x)

    for method in ("measure", "estimate"):
        with pytest.raises(ModelError, match="has a forward of its own: Sum") as caught:
            gb.profile_model(Sum(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4), method=method)
        assert "Fix: " in str(caught.value)


def test_a_loss_with_parameters_of_its_own_is_told() -> None:
    """A function cannot say which it uses: it is flagged, unless they are the model's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    features = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).requires_grad_(False)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = features

        def forward(self, output: Tensor) -> Tensor:
            return self.features(output).square().mean()

    class Callable:
        def __call__(self, output: Tensor) -> Tensor:
            return features(output).square().mean()

    losses: list[tuple[Any, bool]] = [
        (lambda output: features(output).square().mean(), True),
        (Callable(), True),
        (Loss(), False),
        (lambda output: (output @ model[0].weight).square().mean(), False),
        (nn.functional.mse_loss, False),
    ]
    for loss_fn, told in losses:
        target = torch.ones(4, 4) if loss_fn is nn.functional.mse_loss else None
        found = profile(model, torch.ones(4, 4), loss_fn=loss_fn, target=target)
        assert bool(flags_of(found, "the loss can use parameters")) is told


class Noted:
    """A lock that says when another thread than its maker's begins to wait for it."""

    def __init__(self) -> None:
        self._lock, self._maker = threading.RLock(), threading.current_thread()
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is not self._maker:
            self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_a_profile_that_waits_puts_nothing_of_the_one_before_back(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, torch is as it was when its turn came, and not as the other one had it."""
    lock, failures = Noted(), list[Exception]()
    monkeypatch.setattr(harmless, "_at_work", lock)
    fast = torch.backends.mha.get_fastpath_enabled()

    def fail() -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        try:
            gb.profile_model(model, torch.ones(2, 5), method=method)
        except ProfileError as error:
            failures.append(error)

    waiting = threading.Thread(target=fail)
    try:
        with lock:
            # As where another profile counts operations.
            torch.backends.mha.set_fastpath_enabled(not fast)
            waiting.start()
            assert lock.is_wanted.wait(30)
            torch.backends.mha.set_fastpath_enabled(fast)
        waiting.join(30)
        assert failures and torch.backends.mha.get_fastpath_enabled() == fast
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Masked(nn.Module):
    """Keeps masks in containers that are attributes of a parameter and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.register_buffer("scale", torch.ones(4))
        self.weight.masks = {}  # type: ignore[attr-defined]
        self.weight.owner = self  # type: ignore[attr-defined]
        self.scale.kept = [[]]  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.owner is self  # type: ignore[attr-defined]
        masks, kept = self.weight.masks, self.scale.kept[0]  # type: ignore[attr-defined]
        if not kept:
            kept.append(torch.ones(4, device=x.device))
        if "mask" not in masks:
            masks["mask"] = torch.ones(4, 4, device=x.device)
        return torch.nn.functional.linear(x * kept[0], self.weight * masks["mask"])


@pytest.mark.parametrize("more", [{"method": "estimate"}, {"timeout": 0}])
def test_containers_that_parameters_keep_are_copied(more: dict[str, Any]) -> None:
    """The caller's stay empty, and the model runs afterwards."""
    layer = Masked()
    model = nn.Sequential(nn.Linear(4, 4), layer)
    x = torch.randn(8, 4)
    gb.profile_model(model, x, chunks=2, progress=False, **more)
    assert layer.weight.masks == {} and layer.scale.kept == [[]]  # type: ignore[union-attr, operator]
    model(x).sum().backward()


@pytest.mark.parametrize("more", [{"method": "estimate"}, {"timeout": 0}])
def test_a_generator_of_a_layer_is_where_it_was(more: dict[str, Any]) -> None:
    """Random numbers that copies draw are not those of the layer."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generators = [torch.Generator().manual_seed(0)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(x.shape, generator=self.generators[0], device="cpu")
            return x + noise.to(x.device)

    model = nn.Sequential(nn.Linear(4, 4), Noise())
    before = model[1].generators[0].get_state()
    gb.profile_model(model, torch.randn(8, 4), chunks=2, progress=False, **more)
    assert torch.equal(model[1].generators[0].get_state(), before)
