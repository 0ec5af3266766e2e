"""profiles/: every stored profile loads, says where it comes from, plans, and is small."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.models import CATALOGUE
from gpipebal.profile import LayerProfile, Profile

FOLDER = Path(gb.__file__).parent.parent / "profiles"
FILES = sorted(FOLDER.glob("*.json"))
#: Files are committed, and read by tests: bytes.
MOST_BYTES = 500_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_profile_says_where_it_comes_from(path: Path) -> None:
    """A profile tells device, versions and date, has other sizes, and a row in the README."""
    profile = Profile.load(path)
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {"device", "torch", "gpipebal", "date", "method"} <= profile.provenance.keys()
    estimated = profile.provenance["method"] == "estimate"
    assert ("rates" if estimated else "rounds") in profile.provenance
    assert path.stem.endswith("-estimate") == estimated
    assert f"-rows{profile.rows}-" in path.name
    assert profile.other_sizes
    assert profile.step.optimizer_time is not None and profile.step.whole_loss is not None
    assert path.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_profile_plans(path: Path) -> None:
    """A profile is planned optimally for 2, 4 and 8 partitions, at its own rows and others."""
    profile = Profile.load(path)
    for partitions in (2, 4, 8):
        plan = gb.solve(profile, partitions)
        assert plan.status == "optimal" and plan.n_partitions == partitions
        assert gb.simulate(plan).makespan == pytest.approx(plan.makespan, rel=1e-12)
        assert plan.step_time is not None and plan.step_time > 0
        assert all(part.memory.total > 0 for part in plan.partitions)
    other = profile.at_rows(profile.other_sizes[0].rows)
    assert gb.solve(other, 2).rows == profile.other_sizes[0].rows


def test_every_stored_profile_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script knows every file: built-in models measured and estimated, the benchmark's too."""
    make = _make()
    assert sorted(stored.name for stored in make.STORED) == [path.stem for path in FILES]
    built_in = [stored for stored in make.STORED if not stored.of_benchmark]
    kinds = {(stored.model, stored.estimate is None) for stored in built_in}
    published = ("resnet101", "amoebanetd", "unet", "gpt")
    assert kinds >= {(model, measured) for model in published for measured in (True, False)}
    assert {model for model, _ in kinds} <= CATALOGUE.keys()
    monkeypatch.syspath_prepend(make.BENCHMARK)
    from prediction_benchmark.models import MODELS

    of_benchmark = {stored.model for stored in make.STORED if stored.of_benchmark}
    assert of_benchmark == {model.name for model in MODELS}
    for stored, path in ((s, FOLDER / f"{s.name}.json") for s in make.STORED):
        profile = Profile.load(path)
        assert profile.rows == stored.rows
        assert {other.rows for other in profile.other_sizes} == set(stored.other_rows)


def test_script_finds_the_models_of_the_benchmark_by_itself() -> None:
    """Started alone, with no path that another test or script has prepared."""
    code = (
        "import runpy, sys; names = runpy.run_path(sys.argv[1]);"
        "print(*(type(names['subject_of'](stored).build()).__name__"
        " for stored in names['STORED'] if stored.of_benchmark))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / "make.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert set(found.stdout.split()) == {"Sequential"}


def test_small_file_says_the_same() -> None:
    """What is left out of a file is what a reader fills in: plans and bytes stay, times nearly."""
    make = _make()
    profile = Profile.from_costs([1.234567, 2.0], output_bytes=[3, 4], rows=2, chunks=4)
    layers = (
        replace(
            profile.layers[0],
            no_grad_forward_time=1.234567,
            no_grad_forward_peak_bytes=3,
            accumulating_peak_bytes=5,
            optimizer_bytes=0,
        ),
        profile.layers[1],
    )
    profile = replace(profile, layers=layers)
    other = replace(profile, rows=4, mini_batch_rows=16)
    record = json.loads(json.dumps(make.shrink(replace(profile, other_sizes=(other,)))))
    found = Profile.from_dict(record)
    assert "no_grad_forward_time" not in record["layers"][0]
    assert record["layers"][0]["accumulating_peak_bytes"] == 5
    assert record["layers"][0]["optimizer_bytes"] == 0
    assert found.layers[0].forward_time == 1.235
    assert found.names == profile.names and found.storages == profile.storages
    assert gb.solve(found, 2).balance == gb.solve(profile, 2).balance
    for size in (found, *found.other_sizes):
        assert size.layers[0].forward_peak_bytes == 3


def test_peak_is_left_out_only_with_its_moments() -> None:
    """Peaks that are equal at all sizes may differ between them, if other moments make them."""
    make = _make()
    profile = Profile.from_costs([1.0], rows=1)

    def shrunk(forward: tuple[int, ...], without_graph: tuple[int, ...]) -> Any:
        layer = replace(
            profile.layers[0],
            forward_peak_bytes=8,
            no_grad_forward_peak_bytes=8,
            forward_moments=forward,
            no_grad_forward_moments=without_graph,
        )
        (record,) = make.shrink(replace(profile, layers=(layer,)))["layers"]
        return record

    same, other = shrunk((8, 2), (8, 2)), shrunk((8, 2), (3, 8))
    assert not {"no_grad_forward_peak_bytes", "no_grad_forward_moments"} & same.keys()
    assert other["no_grad_forward_peak_bytes"] == 8
    assert other["no_grad_forward_moments"] == [3, 8]


def test_field_that_differs_at_one_size_is_kept_at_all() -> None:
    """A field tells the same at all sizes: it is left out of all or of none."""
    make = _make()
    profile = Profile.from_costs([1.0], rows=1)

    def with_time(seconds: float, rows: int) -> Profile:
        layer = replace(profile.layers[0], no_grad_forward_time=seconds)
        return replace(profile, layers=(layer,), rows=rows, mini_batch_rows=rows)

    record = make.shrink(replace(with_time(1.0, 1), other_sizes=(with_time(0.5, 2),)))
    assert record["layers"][0]["no_grad_forward_time"] == 1.0
    assert record["other_sizes"][0]["layers"][0]["no_grad_forward_time"] == 0.5


def test_fields_that_have_a_stand_in_exist() -> None:
    """Each field that may be left out, and its stand-in, is a field of a layer."""
    for pair in _make()._STAND_INS.items():
        assert set(pair) <= set(LayerProfile.__dataclass_fields__)


def _make() -> Any:
    spec = importlib.util.spec_from_file_location("make_profiles", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
