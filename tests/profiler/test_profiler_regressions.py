"""The profiler and its commands: single cases that were wrong once."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_chains import Apply
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.cli import main
from gpipebal.errors import FileFormatError, ProfileError, UsageError
from gpipebal.profile import Profile
from gpipebal.profiler import setting
from gpipebal.timeline import Timeline
from gpipebal.units import parse_bytes


class Shrinks(nn.Linear):
    """Writes to its own weight, where nobody counts it."""

    def forward(self, x: Tensor) -> Tensor:
        """Shrink the weight, and use it."""
        self.weight.data.mul_(0.99)
        return super().forward(x)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_tied_weight_that_one_layer_writes_to_stays_as_it_is(order: tuple[int, ...]) -> None:
    """Whichever of its layers comes first."""
    layers = [nn.Linear(4, 4), nn.ReLU(), Shrinks(4, 4)]
    layers[2].weight = layers[0].weight
    before = layers[0].weight.detach().clone()
    model = nn.Sequential(*(layers[k] for k in order))
    gb.profile_model(model, torch.randn(4, 4), rows=(), timeout=0.0)
    assert torch.equal(layers[0].weight, before)


def test_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of its limit, where that is less than what the machine has."""
    machine = setting.available_memory()
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(setting, "_CONTAINER_FILES", ((str(limit), str(used)),))
    assert setting.available_memory() > 0  # there are no such files
    used.write_text("300\n")
    for text, expected in (("1000\n", 700), ("200\n", 0)):
        limit.write_text(text)
        assert setting.available_memory() == min(expected, machine)
    limit.write_text("max\n")
    assert setting.available_memory() > 700


@pytest.mark.parametrize("way", [{"method": "estimate"}, {"timeout": 0.0}])
def test_what_hooks_and_lists_of_functions_keep_is_put_back(way: dict[str, Any]) -> None:
    """Copies of a layer have the same functions, which write to the same places."""
    seen: dict[str, Any] = {}

    class Lists(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.functions = [lambda x: seen.__setitem__("list", x)]

        def forward(self, x: Tensor) -> Tensor:
            for function in self.functions:
                function(x)
            return super().forward(x)

    model = nn.Sequential(Lists(), nn.ReLU())
    model[1].register_forward_hook(lambda module, inputs, output: seen.__setitem__("hook", output))
    gb.profile_model(model, torch.ones(4, 4), rows=(), **way)
    assert seen == {}


@pytest.mark.parametrize(
    "words",
    [
        ["gpt", "--rows", "-1", "--set", "layers=1", "--set", "width=8", "--set", "heads=2"],
        ["resnet101", "--seed", "100000000000000000000"],
        ["resnet101", "--image-size", "0"],
    ],
)
def test_impossible_sizes_are_bad_input(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is built, with a fix and the documented status."""
    path = tmp_path / "profile.json"
    assert main(["profile", *words, "-o", str(path)]) == 2
    assert "Fix: " in capsys.readouterr().err
    assert not path.exists()


def test_an_optimizer_that_steps_no_stand_ins_is_not_timed() -> None:
    """What was measured is kept, and the profile says what is not known."""
    model = nn.Sequential(nn.Embedding(9, 4))  # with dense gradients
    profile = gb.profile_model(
        model,
        torch.zeros(4, dtype=torch.long),
        rows=(),
        timeout=0.0,
        optimizer=torch.optim.SparseAdam,
    )
    assert profile.step.optimizer_time is None
    reason = "cannot step stand-ins (RuntimeError: SparseAdam does not support dense gradients"
    assert any(reason in flag for flag in profile.provenance["flags"])


def test_attributes_that_go_by_the_rows_do_so_between_sizes() -> None:
    """A layer that keeps its output keeps more of a larger micro-batch."""

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last = y.detach().clone()
            return y

    profile = gb.profile_model(
        nn.Sequential(Keeps(64, 64)), torch.randn(32, 64), chunks=8, rows=(2, 8), timeout=0.0
    )
    found = [profile.at_rows(rows).layers[0].buffer_bytes for rows in (2, 4, 8, 16)]
    assert found == [rows * 64 * 4 for rows in (2, 4, 8, 16)]


def test_sparse_values_between_layers_are_profiled() -> None:
    """As a pipeline hands them on."""

    class Sparse(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to_sparse()

    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_dense()

    profile = gb.profile_model(
        nn.Sequential(Sparse(4, 4), Dense()), torch.ones(4, 4), rows=(), timeout=0.0
    )
    assert profile.n_layers == 2


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_a_sparse_target_counts_with_its_elements(method: Any) -> None:
    """Not with those that it leaves out."""
    target = torch.eye(100).to_sparse()
    profile = gb.profile_model(
        nn.Sequential(nn.Linear(4, 4)),
        torch.ones(4, 4),
        loss_fn=lambda y, t: y.sum() * t.values().sum(),
        target=target,
        target_dims=None,
        rows=(),
        method=method,
        **({"timeout": 0.0, "as_pipeline": False} if method == "measure" else {}),
    )
    assert profile.step.loss is not None
    assert profile.step.loss.buffer_bytes == 100 * (2 * 8 + 4)


@pytest.mark.parametrize("progress", [None, True])
@pytest.mark.parametrize("stream", [None, "log", "closed"])
def test_no_terminal_is_no_error(
    stream: str | None, progress: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons have no standard error or a closed one, and loggers put something in its place."""

    class Log:
        def write(self, text: str) -> None:
            """Drop it."""

        def flush(self) -> None:
            """Do nothing."""

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {None: None, "log": Log(), "closed": closed}[stream])
    gb.profile_model(
        nn.Sequential(nn.Linear(2, 2)),
        torch.ones(2, 2),
        rows=(),
        timeout=0.0,
        as_pipeline=False,
        progress=progress,
    )


def test_numbers_that_no_machine_has_are_refused(tmp_path: Path) -> None:
    """Digits without end, in a file and in a size; and rows without end in a timeline."""
    with pytest.raises(UsageError, match="size is not readable"):
        parse_bytes("9" * 400)
    record = Profile.from_costs([1.0]).to_dict()
    path = tmp_path / "profile.json"
    for part, name in ((record["layers"][0], "forward_time"), (record["step"], "gather_time")):
        before, part[name] = part[name], 10**400
        path.write_text(json.dumps(record))
        with pytest.raises(FileFormatError, match=f"{name}=1000"):
            Profile.load(path)
        part[name] = before
    with pytest.raises(FileFormatError, match="number of partitions"):
        Timeline.from_dict({**Timeline((), 1).to_dict(), "n_partitions": 2**20})


class UnspeakableError(ValueError):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AssertionError(), r"torch.float32: AssertionError\nFix: "),
        (UnspeakableError(), r"torch.float32: UnspeakableError\nFix: "),
        (ValueError("a\r\nb\r\n"), r"ValueError: a\nb\nFix: "),
        (ValueError("line\n" * 1000), r"ValueError: line\n(line\n){18}line \.\.\.\nFix: "),
    ],
)
@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_errors_of_layers_are_said_in_few_words(error: Exception, text: str, method: Any) -> None:
    """One without a text, one whose text fails, and one with a thousand lines."""

    def fail(x: Tensor) -> Tensor:
        raise error

    model = nn.Sequential(nn.Linear(2, 2), Apply(fail))
    with pytest.raises(ProfileError, match=text):
        gb.profile_model(model, torch.ones(4, 2), chunks=2, rows=(), method=method)
