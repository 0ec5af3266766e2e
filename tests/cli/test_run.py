"""The whole job on tiny models: what it writes, what it reports, and what it refuses."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from gpipebal.errors import (
    BalanceError,
    DeviceError,
    GpipebalError,
    InfeasibleError,
    KindError,
    ModelError,
    ProfileError,
    UnsupportedPlanError,
    UsageError,
)
from gpipebal.models import MODELS
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.layers.devices import visible_cores
from gpipebal.plan import Plan
from gpipebal.planner import solve
from gpipebal.profile import Profile
from gpipebal.profiler.setting import threads_set
from gpipebal.report import RunReport
from gpipebal.run import FILES, Workload, attempts, comparison, job, load_workload, run
from gpipebal.run.folder import Folder
from gpipebal.run.places import choose_places, describe_places
from gpipebal.run.training import PipelineTrainer, PlainTrainer
from gpipebal.timeline import Timeline


@pytest.fixture
def short_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the profiler measure everything once: what it measures is not tested here."""
    measure = job.profile_model
    monkeypatch.setattr(job, "profile_model", lambda *a, **k: measure(*a, **k, timeout=0.0))


@pytest.fixture
def empty_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the picture have nothing in it: drawing it takes longer than all else of a tiny run."""
    monkeypatch.setattr(job, "plot_run", lambda *_: Figure())


#: For runs of which neither what they measure nor what they draw is tested.
BRIEF = pytest.mark.usefixtures("short_profile", "empty_picture")


@BRIEF
def test_run_keeps_a_memory_limit(tmp_path: Path) -> None:
    """A limit may force recomputes, which the report names; what fits nowhere is said."""

    def tried(**options: Any) -> Any:
        return run(
            "workloads:tiny", partitions=2, chunks=4, steps=1, device="cpu", output=tmp_path,
            echo=str, progress=False, **options,
        )  # fmt: skip

    free = tried(checkpoint="auto")
    assert free.checkpoint == "never"
    profile, plan = Profile.load(tmp_path / "profile.json"), Plan.load(tmp_path / "plan.json")
    least = solve(profile, 2, objective="peak_memory", checkpoint="auto", shared_memory=True)
    limit = max(part.memory.total for part in least.partitions)
    assert limit < max(part.memory.total for part in plan.partitions)
    # The optimizer's and the profiler's own bytes do not vary, only times do.
    tight = tried(checkpoint="auto", memory_limit=limit + 64)
    assert max(tight.predicted_peak_bytes) <= limit + 64
    assert any("each was given the whole memory limit" in note for note in tight.notes)
    (tmp_path / "profile.json").unlink()
    with pytest.raises(InfeasibleError, match="does not fit its device"):
        tried(memory_limit=1000)
    assert Profile.load(tmp_path / "profile.json").n_layers == 5  # what took minutes is kept


@BRIEF
def test_run_says_that_the_profile_is_of_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predictions then may be far off; of other flags the profile itself tells."""
    measure = job.profile_model
    flags = ["wide: they spread", "busy: no core for 60% of the time; measure again"]

    def flagged(*args: Any, **options: Any) -> Profile:
        profile = measure(*args, **options)
        return replace(profile, provenance={**profile.provenance, "flags": flags})

    monkeypatch.setattr(job, "profile_model", flagged)
    report = run(
        "workloads:tiny", chunks=2, steps=1, device="cpu", output=tmp_path, echo=str, progress=False
    )
    said = "The machine was busy: no core for 60% of the time; measure again."
    assert said in report.notes and not any("they spread" in note for note in report.notes)


@BRIEF
def test_run_profiles_and_trains_under_the_autocast_of_the_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line has no option for it."""
    dtypes = []
    train = job.train_in_turns

    def watched(pipe: GPipe, *args: Any, **options: Any) -> Any:
        pipe[-1].register_forward_hook(lambda _layer, _input, output: dtypes.append(output.dtype))
        return train(pipe, *args, **options)

    monkeypatch.setattr(job, "train_in_turns", watched)
    try:
        run(
            "workloads:tiny_under_autocast", chunks=2, steps=1, device="cpu", output=tmp_path,
            echo=str, progress=False,
        )  # fmt: skip
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert Profile.load(tmp_path / "profile.json").provenance["autocast"] == "bfloat16"
    assert set(dtypes) == {torch.bfloat16}


@pytest.mark.usefixtures("short_profile")
def test_run_does_the_whole_job(tmp_path: Path) -> None:
    """One call profiles, plans, trains and compares, and leaves all files readable."""
    said: list[str] = []
    threads = torch.get_num_threads()
    report = run(
        "workloads:tiny", partitions=2, chunks=4, steps=3, device="cpu", output=tmp_path / "out",
        echo=said.append, progress=False,
    )  # fmt: skip
    assert torch.get_num_threads() == threads
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == set(FILES)

    profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
    assert profile.n_layers == plan.n_layers == 5
    assert profile.provenance["threads"] == report.threads_per_partition
    assert (plan.chunks, plan.rows, plan.status) == (4, 2, "optimal")
    assert f"\n{plan}\n" in said
    timeline = Timeline.load(folder / "timeline.json")
    assert (timeline.source, timeline.n_partitions, timeline.chunks) == ("measured", 2, 4)
    assert timeline.provenance["balance"] == plan.balance
    # Two timelines stand in the trace: as measured, and as predicted.
    trace = (folder / "timeline.json").read_text()
    assert "2 simulated" in trace
    # The predicted one is that of the predicted step, less what is outside of the timeline.
    ends = [
        event["ts"] + event["dur"]
        for event in json.loads(trace)["traceEvents"]
        if event["ph"] == "X" and event["pid"] == 2
    ]
    assert 0 < max(ends) / 1e6 <= plan.step_time + 1e-9
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")

    assert report.balance == plan.balance
    assert report.predicted_step_time == plan.step_time is not None
    assert len(report.step_times) == 3 and min(report.step_times) > 0
    assert all(len(plain.step_times) == 3 for plain in report.plain)
    assert report.plain[0].threads == 1 and report.plain[-1].threads == visible_cores()
    assert report.predicted_peak_bytes == tuple(p.memory.total for p in plan.partitions)
    assert len(report.peak_bytes) == 2
    assert max(report.peak_bytes) <= report.total_peak_bytes <= sum(report.peak_bytes)
    assert (report.loss, report.optimizer) == (
        "mean_of_squares (default)",
        "SGD(lr=0.01) (default)",
    )
    assert "loss mean_of_squares (default), optimizer SGD(lr=0.01) (default)" in "\n".join(said)
    saved = json.loads((folder / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    assert (saved["format"], saved["version"]) == ("gpipebal-report", 1)


@BRIEF
def test_run_uses_what_the_user_gives(tmp_path: Path) -> None:
    """Loss and optimizer of the user's mapping are used, and named without '(default)'."""
    report = run(
        "workloads:tiny_with_everything", partitions=3, chunks=2, steps=1, device="cpu",
        checkpoint="never", threads_per_partition=1, output=tmp_path, echo=str, progress=False,
    )  # fmt: skip
    assert (report.loss, report.optimizer) == ("L1Loss", "Adam(lr=0.001)")
    assert (len(report.balance), report.threads_per_partition) == (3, 1)
    assert report.checkpoint == "never"


@BRIEF
def test_run_steps_several_optimizers(tmp_path: Path) -> None:
    """Both trainings make them, and the pipeline's memory has the state of both."""
    said: list[str] = []
    report = run(
        "workloads:two_optimizers", partitions=2, chunks=2, steps=1, device="cpu",
        output=tmp_path, echo=said.append, progress=False,
    )  # fmt: skip
    assert report.optimizer == "Muon(lr=0.02) and Adam(lr=0.001)"
    assert "Peak memory does not count optimizer state" not in "\n".join(said)


@BRIEF
def test_run_steps_what_wraps_an_optimizer(tmp_path: Path) -> None:
    """It need not be an optimizer by its class."""
    report = run(
        "workloads:wrapped_optimizer", partitions=2, chunks=2, steps=1, device="cpu",
        output=tmp_path, echo=str, progress=False,
    )  # fmt: skip
    assert report.optimizer == "Wrapper(lr=0.001)"


def squares_of(output: torch.Tensor, target: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Take the mean of squares; targets are broadcast."""
    return (output - target).square().mean()


@BRIEF
def test_run_follows_the_dimensions(tmp_path: Path) -> None:
    """Rows along dim 1 and a keyword argument: the same run; both trainings do the same."""
    report = run(
        "workloads:tiny_with_dimensions", partitions=2, chunks=2, steps=1, device="cpu",
        attempts=2, output=tmp_path, echo=str, progress=False,
    )  # fmt: skip
    assert (report.mini_batch_rows, report.chunks) == (8, 2)
    workload = load_workload("workloads:tiny_with_dimensions")
    for target in (workload.target, None, torch.zeros(1)):
        workload.target = target
        workload.loss_fn = squares_of
        plain = copy.deepcopy(workload.model)
        pipe = GPipe(workload.model, [2, 2], chunks=3, **workload.dims)
        PipelineTrainer(pipe, workload).step()
        PlainTrainer(plain, workload, 3, torch.device("cpu")).step()
        for one, two in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, two)
        pipe.close()


@BRIEF
def test_run_says_what_limits_its_figures(tmp_path: Path) -> None:
    """More micro-batches than rows, and more threads than cores, are said in notes."""
    report = run(
        "workloads:tiny_classifier", partitions=2, chunks=4, steps=1, device="cpu",
        threads_per_partition=visible_cores(), output=tmp_path, echo=str, progress=False,
    )  # fmt: skip
    assert (report.chunks, report.loss) == (4, "cross_entropy (default)")
    notes = " ".join(report.notes)
    assert f"share {visible_cores()} cores: the prediction takes" in notes
    tall = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    workload = replace(load_workload("workloads:tiny"), model=tall, sample=torch.ones(3, 2))
    asked = job._Job(
        workload, choose_places("cpu"), 1, 8, {"checkpoint": "never"}, 1, 0,
        Folder(tmp_path / "few"), False, str,
    )  # fmt: skip
    few = asked.do()
    assert few.chunks == 3
    assert "8 micro-batches were asked for, but the mini-batch has only 3 rows" in str(few)


@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_writes_nothing_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Ctrl-C while the layers are profiled takes away the folders that were made; others stay."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "runs" / "first"
    if there:
        folder.mkdir(parents=True)
    monkeypatch.setattr(job, "profile_model", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("workloads:tiny", chunks=2, output=folder, device="cpu", echo=str, progress=False)
    assert folder.exists() is (tmp_path / "runs").exists() is there


@BRIEF
def test_interrupted_run_keeps_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves the finished files whole, and its note tells them from older ones."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "plan.png").write_text("from an earlier run")
    monkeypatch.setattr(job, "train_in_turns", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run("workloads:tiny", chunks=2, output=tmp_path, device="cpu", echo=str, progress=False)
    note = f"{tmp_path}: profile.json, plan.json written; plan.png from before"
    assert caught.value.__notes__ == [note]
    assert Plan.load(tmp_path / "plan.json").n_layers == 5
    assert Profile.load(tmp_path / "profile.json").n_layers == 5
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json", "plan.json", "plan.png"}


@BRIEF
def test_a_model_in_evaluation_mode_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is profiled: in evaluation mode a pipeline would recompute nothing."""
    modes: list[set[bool]] = []
    train = job.train_in_turns

    def seen(pipe: GPipe, plain_model: nn.Module, *more: Any, **options: Any) -> Any:
        modes.append({part.training for part in (*pipe.modules(), *plain_model.modules())})
        return train(pipe, plain_model, *more, **options)

    monkeypatch.setattr(job, "train_in_turns", seen)
    run(
        "workloads:tiny_in_evaluation_mode", chunks=2, steps=1, output=tmp_path, device="cpu",
        echo=str, progress=False,
    )  # fmt: skip
    assert modes == [{True}]


def two_steps(folder: Path) -> RunReport:
    """Run a tiny model for two steps, without a word."""
    return run(
        "workloads:tiny", chunks=2, steps=2, output=folder, device="cpu", echo=str,
        progress=False,
    )  # fmt: skip


@BRIEF
@pytest.mark.parametrize(
    ("plain", "note"),
    [
        ((1.0, 1.05, 0.95, 7.0), None),  # one slow step changes no median
        ((1.0, 1.0, 1.19, 1.2), None),
        ((1.0, 1.0, 1.23, 1.23), "10.3 %"),
        ((1.0, 2.0, 2.0, 4.0), "25.0 %"),
    ],
)
def test_run_warns_of_a_plain_model_whose_steps_scatter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: tuple[float, ...], note: str | None
) -> None:
    """In one line; the pipeline's own steps may scatter, which its table shows."""
    monkeypatch.setattr(comparison, "_plain_ways", lambda _: [("1 thread", 1), ("cuda:0", None)])
    steady, scattered = iter([9.0, *[3.0] * 4]), iter([9.0, *plain])
    of_pipe = iter([9.0, 1.0, 8.0, 2.0, 5.0])
    turns = iter([each for turn in zip(of_pipe, scattered, steady, strict=True) for each in turn])

    def timed(step: Any, _: Any) -> float:
        step()
        return next(turns)

    monkeypatch.setattr(comparison, "timed", timed)
    report = run(
        "workloads:tiny", chunks=2, steps=4, output=tmp_path, device="cpu", echo=str,
        progress=False,
    )  # fmt: skip
    assert report.plain[0].step_times == plain and report.plain[1].step_times == (3.0,) * 4
    said = [line for line in str(report).splitlines() if "scatter" in line]
    assert [line for line in report.notes if "scatter" in line] == [s[6:] for s in said]
    if note is None:
        assert not said
    else:
        assert (
            len(said) == 1
            and f" by {note} (1 thread) or more (expected less than 10.0 %)" in said[0]
        )


@BRIEF
def test_plain_model_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory ends, the pipeline is still reported, and the note says what is missing."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(comparison, "PlainTrainer", full)
    report = two_steps(tmp_path)
    assert report.plain == () and len(report.step_times) == 2
    assert "The plain model does not fit on cpu: no comparison." in report.notes


@BRIEF
def test_a_plain_model_beside_which_the_pipeline_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline goes on without it, and its steps are those that came to their end."""
    calls: list[int] = []
    step = comparison.PipelineTrainer.step

    def full(trainer: Any) -> None:
        step(trainer)
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(comparison.PipelineTrainer, "step", full)
    report = two_steps(tmp_path)
    assert report.plain == () and len(report.step_times) == 2
    assert "The plain model does not fit on cpu beside the pipeline: no comparison." in report.notes
    # Warm-up, one that failed, two that count, one to measure memory.
    assert len(calls) == 5


@BRIEF
def test_a_plan_that_runs_out_of_memory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are tried all the same; if none fits, its error comes through."""
    first: list[tuple[int, ...]] = []
    steps = attempts._some_steps

    def full(model: Any, plan: Plan, *more: Any) -> list[float]:
        first.append(plan.balance)
        if plan.balance == first[0] or everywhere:
            raise torch.OutOfMemoryError("no memory left")
        return steps(model, plan, *more)

    monkeypatch.setattr(attempts, "_some_steps", full)
    told: list[str] = []
    options: dict[str, Any] = {
        "chunks": 2, "steps": 1, "attempts": 2, "output": tmp_path, "device": "cpu",
        "echo": told.append, "progress": False,
    }  # fmt: skip
    everywhere = False
    run("workloads:tiny", **options)
    assert Plan.load(tmp_path / "plan.json").balance != first[0]
    assert "out of memory" in "\n".join(told)
    everywhere = True
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        run("workloads:tiny", **options)


@pytest.mark.cuda
@BRIEF
def test_partitions_share_one_cuda_device(tmp_path: Path) -> None:
    """With one CUDA device two partitions take it in turns, and the report says so."""
    report = run(
        "workloads:tiny", partitions=2, chunks=2, steps=1, device="cuda:0", output=tmp_path,
        echo=str, progress=False,
    )  # fmt: skip
    assert report.devices == ("cuda:0", "cuda:0") and report.threads_per_partition is None
    assert [plain.where for plain in report.plain] == ["cuda:0"]
    assert any("Partitions share devices" in note for note in report.notes)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"model": "resnet18"},
            UsageError,
            rf"model='resnet18' \(expected {', '.join(sorted(MODELS))}, or .*\n?.*Fix: resnet1",
        ),
        ({"model": "no_such_module_at_all:f"}, UsageError, "no module named 'no_such_module_at"),
        ({"model": "workloads.sub:f"}, UsageError, "no module named 'workloads.sub'"),
        ({"model": ":f"}, UsageError, "model is not readable: model=':f'"),
        ({"model": "workloads:"}, UsageError, "model is not readable"),
        ({"model": "workloads.py:tiny"}, UsageError, "by a path: .*\nFix: workloads:tiny, in"),
        ({"model": "./workloads.py:tiny"}, UsageError, "by a path: .*\nFix: workloads:tiny, in"),
        ({"model": "a/workloads:tiny"}, UsageError, "by a path: .*\nFix: workloads:tiny, in"),
        ({"model": "workloads.py"}, UsageError, "by a path: .*\nFix: workloads:make_model, in"),
        ({"model": "a/workloads"}, UsageError, "by a path: .*\nFix: workloads:make_model, in"),
        ({"model": "workloads."}, UsageError, "not known: .*\nFix: workloads:make_model, where"),
        ({"model": "workloads:missing"}, UsageError, "'missing' of module 'workloads' does not"),
        ({"model": "workloads:NOT_A_FUNCTION"}, UsageError, "is of type int"),
        ({"model": "workloads:needing_arguments"}, UsageError, "'width'; it takes width"),
        ({"model": "workloads:model_only"}, UsageError, "returned Sequential"),
        ({"model": "workloads:three_things"}, UsageError, "returned tuple of 3"),
        ({"model": "workloads:mapping_without_sample"}, UsageError, "returned dict with 'model'"),
        ({"model": "workloads:mapping_with_surprise"}, UsageError, "with .*'losses'"),
        (
            {"model": "workloads:no_chain"},
            UsageError,
            r"a model of type Linear .*\nFix: return nn.Sequential\(\*layers\), where",
        ),
        ({"model": "workloads:layers_only"}, UsageError, r"a model of type list .*\n.*l\(\*layers"),
        ({"model": "workloads:made_optimizer"}, UsageError, "Fix: .*lambda parameters: SGD"),
        (
            {"model": "workloads:made_optimizers"},
            UsageError,
            r"a list as 'opt.*\nFix: .*: \[\.\.\.",
        ),
        (
            {"model": "workloads:lazy"},
            ProfileError,
            r"lazy layers.*\nFix: run model\(sample\) once",
        ),
        ({"model": "workloads:with_closure"}, UsageError, "optimizer needs a closure: LBFGS"),
        ({"model": "workloads:no_tensors"}, ModelError, "sample has no tensor"),
        ({"rows": 4}, UsageError, "--rows is for built-in models: rows=4"),
        ({"image_size": 64}, UsageError, "--image-size is for built-in models"),
        ({"partitions": 0}, BalanceError, "partitions is too small: partitions=0"),
        ({"partitions": 6}, BalanceError, r"partitions=6 \(expected 1..5"),
        ({"chunks": 0}, BalanceError, "chunks is too small: chunks=0"),
        ({"steps": 0}, BalanceError, "steps is too small: steps=0"),
        ({"threads_per_partition": 0}, BalanceError, "threads_per_partition=0"),
        ({"checkpoint": "sometimes"}, BalanceError, "checkpoint='sometimes'"),
        (
            {"schedule": "zb_h1"},
            UnsupportedPlanError,
            r"schedule='zb_h1' \(expected one of 'gpipe', '1f1b'",
        ),
        (
            {"model": "workloads:odd_target", "schedule": "1f1b"},
            UsageError,
            r"'1f1b' needs: it has 3 rows \(expected 8, as the sample\)\.\nFix: schedule='gpipe'",
        ),
        ({"memory_limit": "much"}, BalanceError, "memory_limit.*much"),
        ({"memory_limit": ["1 GiB"] * 3, "partitions": 2}, BalanceError, "len.memory_limit.=3"),
        ({"seed": -1}, UsageError, "seed is out of range: seed=-1"),
        ({"device": "cuda:99"}, DeviceError, "device does not exist: device='cuda:99'"),
        ({"device": "gpu"}, DeviceError, "device is not readable: device='gpu'"),
        ({"device": ""}, DeviceError, "device is not readable: device=''"),
        (
            {"model": "resnet101", "image_size": 32, "rows": 8},
            UsageError,
            "micro-batch is too small to normalise: rows=8 in 8 micro-batches",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], error: type[GpipebalError], message: str
) -> None:
    """What does not exist or cannot be is refused by name, with a fix, and leaves no folder."""
    settings: dict[str, Any] = {"model": "workloads:tiny", "device": "cpu", **options}
    with pytest.raises(error, match=message) as caught:
        run(**settings, output=tmp_path / "out", echo=str)
    assert "\nFix: " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_output_without_a_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty name is none for the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="output folder has no name: output=''"):
        run("workloads:tiny", device="cpu", output="", echo=str)
    assert not list(tmp_path.iterdir())


def test_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """An output folder that cannot be made is refused before the work begins."""
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match=r"output folder cannot be used: output=.* exists"):
        run("workloads:tiny", output=tmp_path / "out", device="cpu", echo=str)
    assert (tmp_path / "out").read_text() == "mine"


def test_an_output_that_no_system_can_make_is_refused(tmp_path: Path) -> None:
    """Also where Python cannot even tell whether it exists; folders made on the way are gone."""
    folder = tmp_path / "runs" / ("x" * 300)
    with pytest.raises(UsageError, match=r"output folder cannot be used: .*name too long"):
        run("workloads:tiny", output=folder, device="cpu", echo=str)
    assert not list(tmp_path.iterdir())


def test_an_output_that_a_report_cannot_name_is_refused(tmp_path: Path) -> None:
    """Before the work begins, and not when it is to be written down."""
    with pytest.raises(UsageError, match=r"output folder cannot be used: .*could not name it"):
        run("workloads:tiny", output=tmp_path / "out\udcff", device="cpu", echo=str)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_no_path_is_refused() -> None:
    """As by whatever reads or writes a file."""
    for output in (3, "a\0b"):
        with pytest.raises(KindError, match="path is not a path"):
            run("workloads:tiny", output=output, device="cpu", echo=str)  # type: ignore[arg-type]


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that exists, but in which no file can be made, is refused before the work begins."""

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("gpipebal.files._make_beside", refuse)
    with pytest.raises(UsageError, match=r"takes no such file: Read-only file system\)"):
        run("workloads:tiny", output=tmp_path, device="cpu", echo=str)


def test_suggested_fixes_work() -> None:
    """The image size and the number of rows that an error suggests are accepted."""
    with pytest.raises(UsageError, match="Fix: --image-size 33, or --rows 16"):
        load_workload("resnet101", rows=8, image_size=32, chunks=8)
    smallest = MODELS["resnet101"].image_size_of_one_row
    assert load_workload("resnet101", rows=8, image_size=smallest, chunks=8).image_size == smallest
    assert load_workload("resnet101", rows=16, image_size=32, chunks=8).sample.shape[0] == 16


def test_users_own_exception_comes_through() -> None:
    """What the user's function or module raises is not dressed up as bad input."""
    with pytest.raises(ZeroDivisionError, match="the user's own fault"):
        load_workload("workloads:raising")


@pytest.mark.parametrize(
    ("source", "error"),
    [("import no_such_dependency", ModuleNotFoundError), ("1 / 0", ZeroDivisionError)],
)
def test_exception_while_a_users_module_is_imported_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, error: type[Exception]
) -> None:
    """A module that exists but fails is the user's to debug, with its own traceback."""
    (tmp_path / "failing_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error):
        load_workload("failing_module:f")


def test_users_function_is_found_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in the folder that the command runs in needs no installation."""
    (tmp_path / "module_of_my_own.py").write_text("from workloads import tiny as mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    workload = load_workload("module_of_my_own:mine")
    assert len(workload.model) == 5
    del sys.modules["module_of_my_own"]


def test_seed_decides_parameters_and_data() -> None:
    """The same seed gives the same model and sample, another seed gives another."""
    first, again, other = (load_workload("workloads:tiny", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.sample, again.sample) and not torch.equal(first.sample, other.sample)
    assert torch.equal(first.model[0].weight, again.model[0].weight)
    assert not torch.equal(first.model[0].weight, other.model[0].weight)


def _workload(target: Any, loss_fn: Any) -> Workload:
    """Return a float64 workload of seven rows, which no number of chunks divides evenly."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    sample = torch.randn(7, 3, dtype=torch.float64)
    return Workload("test", model, sample, target, loss_fn, _momentum, "loss")


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _check_same_training(workload: Workload, checkpoint: Any, schedule: str = "gpipe") -> None:
    """Train both for some steps, the plain model first, and compare parameters and buffers."""
    plain_model = copy.deepcopy(workload.model)
    balance = [2, len(workload.model) - 2]
    pipe = GPipe(workload.model, balance, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    pipe.schedule = schedule
    try:
        trainer = PipelineTrainer(pipe, workload)
        plain = PlainTrainer(plain_model, workload, 3, torch.device("cpu"))
        for _ in range(3):
            plain.step()
            trainer.step()
    finally:
        pipe.close()
    expected, found = plain_model.state_dict(), pipe.state_dict()
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("target", ["classes", "values", "none", "one for all"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_and_plain_model_do_the_same_training(
    target: str, checkpoint: Any, schedule: str
) -> None:
    """After some steps both have the same parameters and buffers, whatever the loss takes."""
    targets: dict[str, tuple[Any, Any]] = {
        "classes": (torch.randint(2, (7,)), nn.CrossEntropyLoss()),
        "values": (torch.randn(7, 2, dtype=torch.float64), nn.MSELoss()),
        "none": (None, lambda output: output.square().mean()),
        # Cannot be parted by rows: the loss is then taken once, over all outputs.
        "one for all": (torch.randn(2, dtype=torch.float64), lambda y, t: (y - t).square().mean()),
    }
    workload = _workload(*targets[target])
    if target == "one for all" and schedule == "1f1b":
        workload = replace(workload, parting={"target_dims": None})
    _check_same_training(workload, checkpoint, schedule)


class Halving(nn.Module):
    """A layer that writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Halve the input in place."""
        return x.mul_(0.5)


def test_a_plain_model_that_writes_to_its_input_leaves_the_data_as_they_are() -> None:
    """Its steps see the same data every time, and so does the pipeline beside it."""
    workload = _workload(torch.randn(7, 2, dtype=torch.float64), nn.MSELoss())
    workload = replace(workload, model=nn.Sequential(Halving(), *workload.model))
    given = workload.sample.clone()
    _check_same_training(workload, "except_last")
    assert torch.equal(workload.sample, given)


def test_cpu_threads_are_given_back() -> None:
    """The caller's number of threads is restored, also when the block raises."""
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), threads_set(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("count", "device", "partitions", "places"),
    [
        (0, "auto", None, ["cpu", "cpu"]),
        (0, "cpu", 3, ["cpu"] * 3),
        (2, "auto", None, ["cuda:0", "cuda:1"]),
        (2, "cuda", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (2, "auto", 1, ["cuda:0"]),
        (2, "cpu", None, ["cpu", "cpu"]),
        (3, "cuda:2, cuda:0", None, ["cuda:2", "cuda:0"]),
        (1, "cuda:0", 2, ["cuda:0", "cuda:0"]),
    ],
)
def test_partitions_go_round_the_devices(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    device: str,
    partitions: int | None,
    places: list[str],
) -> None:
    """Partitions take the devices in turn, and there is one per CUDA device unless told."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert [str(place) for place in choose_places(device, partitions)] == places


@pytest.mark.parametrize(
    ("count", "device", "message"),
    [
        (0, "cuda", "device does not exist: device='cuda' .* 0 CUDA devices"),
        (1, "cuda:1", "device does not exist: device='cuda:1'"),
        (1, "cpu,cuda:0", "devices are of different kinds: device='cpu,cuda:0'"),
        (0, "mps", "kind that is not supported: device='mps'"),
    ],
)
def test_device_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, device: str, message: str
) -> None:
    """A device that does not exist, or a mixture, is refused by name."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(DeviceError, match=message):
        choose_places(device)


def test_sharing_of_devices_is_said() -> None:
    """The reader learns where partitions go, and that they share devices when they do."""
    cuda = [torch.device("cuda", index) for index in (0, 1, 0)]
    assert describe_places(cuda[:2], None) == "2 partitions on cuda:0, cuda:1"
    shared = "3 partitions on 2 CUDA devices, round-robin: cuda:0, cuda:1, cuda:0"
    assert describe_places(cuda, None) == shared
    assert describe_places([torch.device("cpu")] * 2, 1).startswith(
        "2 partitions on the CPU, 1 thread each ("
    )


def test_model_for_an_estimate_has_no_values() -> None:
    """A built-in model of any size can be looked at: parameters and data take no memory."""
    sizes = {"layers": 96, "width": 12288, "heads": 96}
    workload = load_workload("gpt", rows=2, arguments=sizes, with_values=False)
    assert {p.device.type for p in workload.model.parameters()} == {"meta"}
    assert sum(p.numel() for p in workload.model.parameters()) > 170e9
    assert {workload.sample.device.type, workload.target.device.type} == {"meta"}


@BRIEF
@pytest.mark.parametrize(
    "model", ["tiny", "tiny_with_everything", "tiny_with_dimensions", "number_for_target"]
)
def test_a_run_under_1f1b_has_the_loss_inside(model: str, tmp_path: Path) -> None:
    """Plan, training and report are of 1F1B, and the predicted memory is that of its loss."""
    report = run(
        f"workloads:{model}", partitions=2, chunks=4, steps=1, schedule="1F1B", checkpoint="never",
        device="cpu", output=tmp_path, echo=str, progress=False,
    )  # fmt: skip
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.schedule, plan.loss_inside, report.schedule) == ("1f1b", True, "1f1b")
    assert "schedule='1f1b', checkpoint='never'" in str(report)
    assert report.to_dict()["schedule"] == "1f1b"
    assert report.predicted_step_time == plan.step_time is not None
    # Forwards and backwards take turns: partition 1 begins its backwards before its last forward.
    timeline = Timeline.load(tmp_path / "timeline.json")
    row = [e for e in timeline.events if e.partition == 1 and e.kind in "FB"]
    kinds = "".join(event.kind for event in sorted(row, key=lambda event: event.start))
    assert kinds == "FB" * 4
    for predicted, measured in zip(report.predicted_peak_bytes, report.peak_bytes, strict=True):
        # With rows along another dimension, gradients with gaps are planned which do not come. The
        # numbers of the losses come besides: four, and what they are multiplied and added up to.
        assert measured - 4 * 9 <= predicted <= 1.3 * measured


@BRIEF
@pytest.mark.parametrize("checkpoint", ["except_last", "always", "auto"])
def test_run_tries_the_best_plans_and_takes_the_fastest(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several attempts each of the best plans runs, and that with the shortest step stays."""
    tried: list[Plan] = []

    def steps(model: nn.Sequential, plan: Plan, *_: Any) -> list[float]:
        tried.append(plan)
        return [1.0 if len(tried) > 1 and plan.balance == tried[1].balance else 2.0]

    monkeypatch.setattr(attempts, "_some_steps", steps)
    said: list[str] = []
    report = run(
        "workloads:tiny", partitions=2, chunks=2, steps=1, attempts=3, device="cpu",
        checkpoint=checkpoint, output=tmp_path, echo=said.append, progress=False,
    )  # fmt: skip
    assert [plan.balance for plan in tried[:3]] == [plan.balance for plan in tried[:2:-1]]
    assert len({tuple(plan.balance) for plan in tried}) == 3
    assert report.balance == tried[1].balance == Plan.load(tmp_path / "plan.json").balance
    assert "Trying the best 3 plans" in said
    table = next(text for text in said if "measured step" in text).splitlines()
    assert len(table) == 4 and sum(line.endswith("taken") for line in table) == 1


@pytest.mark.parametrize(("device", "n_places"), [("cpu", 2), ("cpu,cpu,cpu", 3), ("cpu,cpu", 2)])
def test_every_device_of_a_list_is_a_partition(device: str, n_places: int) -> None:
    """A list has one partition for each device; the CPU alone has two."""
    assert len(choose_places(device)) == n_places
    assert len(choose_places(device, 4)) == 4
