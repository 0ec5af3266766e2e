"""What people meet: the command, built-in models, verify, pictures."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brief_profiles import make_brief
from small_models import SIZES
from torch import Tensor, nn

import gpipebal
from gpipebal import GPipe, Profile, compare_schedules, plots, solve, verify
from gpipebal.cli import main
from gpipebal.cli.interrupts import INTERRUPTED
from gpipebal.cli.words import BAD_INPUT, complain
from gpipebal.errors import BalanceError, UsageError, VerificationError
from gpipebal.models import MODELS
from gpipebal.plots.style import scale_bytes, scale_seconds
from gpipebal.profiler import profile_model
from gpipebal.run import load_workload, run
from gpipebal.text import one_line
from gpipebal.verification.tolerance import largest

pytestmark = pytest.mark.timeout(120)

FULL = Path("/dev/full")


def frozen() -> tuple[nn.Sequential, Tensor]:
    """Return a chain whose parameters are all frozen."""
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU()).requires_grad_(False), torch.ones(8, 3)


def without_parameters() -> tuple[nn.Sequential, Tensor]:
    """Return a chain that has no parameters."""
    return nn.Sequential(nn.ReLU(), nn.Tanh()), torch.ones(8, 3)


def small() -> tuple[nn.Sequential, Tensor]:
    """Return a chain that can be trained, in a moment."""
    make_brief()
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(8, 3)


def interrupted() -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("make", ["frozen", "without_parameters"])
def test_a_run_with_nothing_to_train_is_refused_before_anything_is_measured(
    make: str, tmp_path: Path
) -> None:
    """It used to fail after the profile, with torch's words."""
    said: list[str] = []
    with pytest.raises(BalanceError, match=r"nothing to train.*\nFix: let a parameter require"):
        run(f"{__name__}:{make}", output=tmp_path / "out", echo=said.append)
    assert not said and not (tmp_path / "out").exists()


def test_a_model_with_nothing_to_train_can_be_profiled() -> None:
    """Only training needs a gradient."""
    workload = load_workload(f"{__name__}:frozen")
    assert profile_model(workload.model, workload.sample, timeout=0.0, progress=False).n_layers == 2


@pytest.mark.parametrize("name", sorted(MODELS))
def test_data_without_values_is_like_data_with_them(name: str) -> None:
    """Shape, type and strides are the same, and no random number is drawn."""
    state = torch.get_rng_state()
    entry = MODELS[name].configure(**SIZES[name][0])
    for make in (entry.make_sample, entry.make_target):
        real, shape = make(4, 64, 0), make(4, 64, None)
        assert shape.is_meta
        assert shape.dtype == real.dtype
        assert (shape.shape, shape.stride()) == (real.shape, real.stride())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_an_estimate_is_the_same_without_values(name: str) -> None:
    """An estimate looks at nothing but shapes."""
    full = load_workload(name, rows=4, arguments=SIZES[name][0])
    bare = load_workload(name, rows=4, arguments=SIZES[name][0], with_values=False)

    def estimate(sample: Any, target: Any) -> Profile:
        return profile_model(
            bare.model,
            sample,
            method="estimate",
            rates="H100",
            chunks=2,
            rows=(),
            loss_fn=bare.loss_fn,
            target=target,
            progress=False,
        )

    with_values = estimate(full.sample, full.target)
    without = estimate(bare.sample, bare.target)
    assert without.layers == with_values.layers
    assert without.step == with_values.step


def test_a_mini_batch_that_fits_nowhere_can_be_estimated() -> None:
    """It used to be allocated on the host."""
    workload = load_workload("resnet101", rows=10**8, image_size=1024, with_values=False)
    assert workload.sample.is_meta
    assert workload.target.is_meta


def _command(*words: str, redirect: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a shell, which can start it without a standard error."""
    package, here = Path(gpipebal.__file__).parents[1], Path(__file__).parents[1] / "helpers"
    path = os.pathsep.join([str(package), str(here)])
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirect}', "sh", sys.executable, "-m", "gpipebal", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.skipif(os.name == "nt", reason="has no such redirections")
def test_a_run_without_standard_error_goes_to_its_end(tmp_path: Path) -> None:
    """Progress bars used to write to None, and messages to standard output."""
    done = _command("run", f"{__name__}:small", "--steps", "1", redirect="2>&-", folder=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "gpipebal-run" / "plan.png").exists()
    bad = _command("show", "nofile", redirect="2>&-", folder=tmp_path)
    assert (bad.returncode, bad.stdout) == (BAD_INPUT, "")


@pytest.mark.skipif(not FULL.exists(), reason="has no full device")
def test_the_exit_status_says_it_where_words_cannot_be_written(tmp_path: Path) -> None:
    """A full disk below standard error used to give status 1."""
    redirect = f"2>{FULL}"
    bad = _command("show", "nofile", redirect=redirect, folder=tmp_path)
    assert bad.returncode == BAD_INPUT
    stopped = _command("run", f"{__name__}:interrupted", redirect=redirect, folder=tmp_path)
    assert stopped.returncode == INTERRUPTED


def test_an_error_that_cannot_be_said_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is what is left then."""

    class Gone:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        flush = write

    monkeypatch.setattr(sys, "stderr", Gone())
    complain("it is wrong.\nFix: it.")


class _Where(nn.Module):
    """Gives unsigned numbers that tell whether a pipeline's worker runs it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_main = threading.current_thread() is threading.main_thread()
        return x, torch.full((x.shape[0],), 1 + is_main, dtype=self.dtype)


UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_outputs_that_differ_are_told(dtype: torch.dtype) -> None:
    """There is no kernel for extremes of the larger unsigned types."""
    model = nn.Sequential(nn.Linear(4, 4), _Where(dtype))
    with pytest.raises(VerificationError, match="output"):
        verify(model, GPipe(model, [1, 1], chunks=2), torch.ones(4, 4))
    assert largest(torch.tensor([0, 7, 3], dtype=dtype)) == 7.0


@pytest.mark.parametrize("seed", ["a", 2**70, -(2**63) - 1, 1.5, True, None])
def test_a_seed_that_torch_cannot_take_is_refused(seed: Any) -> None:
    """Before anything runs, and in words."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(BalanceError, match=r"seed=.*\nFix: seed=0"):
        verify(model, GPipe(model, [1]), torch.ones(4, 4), seed=seed)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_all_seeds_of_torch_are_taken(seed: int) -> None:
    """The smallest and the largest seed are seeds."""
    model = nn.Sequential(nn.Linear(4, 4))
    verify(model, GPipe(model, [1]), torch.ones(4, 4), seed=seed)


@pytest.mark.parametrize(
    "control",
    [*"\x00\x1b\x7f\x80\x85\x9b\x9f\u2028\u2029\u202a\u202e\u2066\u2069"],
    ids=ascii,
)
def test_names_in_files_cannot_steer_a_terminal(control: str) -> None:
    """8-bit and bidirectional controls are controls as well."""
    assert one_line(f"a{control}b") == "a b"


def test_letters_are_no_controls() -> None:
    """What stands beside the controls in Unicode stays."""
    words = "é\xa0ü\u200d層 א\u2027\u202f\u2065"
    assert one_line(words) == words


def _bar_texts(profile: Profile) -> list[str]:
    ax = plots.plot_schedules(compare_schedules(profile, 2))
    return [text.get_text() for text in ax.texts]


def test_schedules_without_sizes_have_no_peaks() -> None:
    """A peak of 0 B would be a lie."""
    assert not any("peak" in text for text in _bar_texts(Profile.from_costs([1.0] * 4, chunks=4)))


def test_schedules_with_sizes_have_peaks() -> None:
    """Where sizes are known, the peak stands behind the bar."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    profile = profile_model(
        model, torch.ones(4, 8), method="estimate", rates="H100", chunks=4, progress=False
    )
    assert any("peak" in text for text in _bar_texts(profile))


def test_large_values_have_their_power_in_the_unit() -> None:
    """A power of ten is part of the unit."""
    assert scale_seconds(9e4) == (1.0, "s")
    assert scale_seconds(1e5) == (1e3, "1e3 s")
    assert scale_seconds(5e307)[1] == "1e306 s"
    assert scale_seconds(math.inf) == (1.0, "s")
    assert scale_bytes(2**50 * 2e7) == (2**50 * 1e6, "1e6 PiB")


@pytest.mark.parametrize("scale", [0.99e5, 1e5, 9.6e5, 1e6, 1e12])
def test_no_axis_has_its_power_above_the_data(scale: float) -> None:
    """It would be written over the legend."""
    profile = Profile.from_costs([3 * scale, scale, 4 * scale], rows=8, chunks=2)
    plan = solve(profile, 2)
    for ax in (
        plots.plot_profile(profile),
        plots.plot_balance(profile, plan),
        plots.plot_partitions(plan),
        plots.plot_chunks([plan]),
        plots.plot_timeline(gpipebal.simulate(plan)),
        plots.plot_schedules(compare_schedules(profile, 2)),
    ):
        ax.figure.draw_without_rendering()
        for axis in (ax.xaxis, ax.yaxis):
            assert axis.get_offset_text().get_text() == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("gpt", "--set", "width=1000000000000", "--set", "heads=1"), "width=1000000000000"),
        (("gpt", "--set", "vocabulary=99999999999999999999"), "vocabulary=99999999999999999999"),
        (("resnet101", "--image-size", "100000000000"), "--image-size 100000000000"),
        (("resnet101", "--rows", "99999999999999999999"), "--rows 99999999999999999999"),
    ],
)
@pytest.mark.parametrize("how", [(), ("--estimate", "H100")])
def test_a_built_in_model_that_is_too_large_names_its_arguments(
    words: tuple[str, ...],
    named: str,
    how: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It used to be torch's traceback."""
    assert main(["profile", *words, *how, "-o", str(tmp_path / "p.json")]) == BAD_INPUT
    said = capsys.readouterr().err
    assert named in said
    assert "\nFix: " in said
    assert "Traceback" not in said


def test_a_model_that_is_too_large_keeps_what_torch_said() -> None:
    """In Python the cause is there."""
    with pytest.raises(UsageError, match="gpt cannot be built so large") as caught:
        load_workload("gpt", arguments={"width": 10**12, "heads": 1}, with_values=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
