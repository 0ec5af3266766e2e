"""Profile: what it holds, what it refuses, and that a file brings back every bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.profile import LayerProfile, Profile, StepTerms

TIMES = st.floats(0, 1e6, allow_nan=False)
BYTES = st.integers(0, 2**50)


def _layer(**changes: Any) -> LayerProfile:
    """Return a layer with round costs, and the given changes."""
    return replace(LayerProfile("conv", "Conv2d", 1.0, 2.0, 1.5), **changes)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw profiles with shared storages and unknown terms."""
    storages = draw(st.lists(BYTES, max_size=5))
    indices = st.lists(st.integers(0, len(storages) - 1), max_size=3) if storages else st.just([])
    layers = draw(
        st.lists(
            st.builds(
                LayerProfile,
                name=st.text(max_size=5),
                kind=st.text(max_size=5),
                forward_time=TIMES,
                backward_time=TIMES,
                recompute_time=TIMES,
                parameter_bytes=BYTES,
                optimizer_bytes=st.none() | BYTES,
                outputs=indices.map(tuple),
                saved=indices.map(tuple),
            ),
            min_size=1,
            max_size=4,
        )
    )
    step = StepTerms(draw(st.none() | TIMES), draw(st.none() | TIMES), draw(st.none() | BYTES))
    return Profile(
        tuple(layers), tuple(storages), rows=draw(st.integers(1, 9)), step=step,
        provenance={"threads": draw(st.none() | st.integers(1, 8))},
    )  # fmt: skip


@settings(max_examples=30)
@given(profiles())
def test_profile_survives_a_file(
    tmp_path_factory: pytest.TempPathFactory, profile: Profile
) -> None:
    """Save and load give the same profile, in every bit."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_from_costs_fills_in_what_is_not_given() -> None:
    """Backward is twice the forward, recompute as long as it, names are indices, bytes are zero."""
    profile = Profile.from_costs([1.0, 2.5], rows=4, chunks=3)
    assert profile.names == ("0", "1")
    assert [layer.backward_time for layer in profile.layers] == [2.0, 5.0]
    assert [layer.recompute_time for layer in profile.layers] == [1.0, 2.5]
    assert profile.bytes_of(range(len(profile.storages))) == 0
    assert (profile.rows, profile.mini_batch_rows, profile.chunks) == (4, 12, 3)
    assert profile.threads is None


def test_from_costs_keeps_every_cost() -> None:
    """Costs that are given come back layer by layer."""
    profile = Profile.from_costs(
        [1, 2],
        [3, 4],
        recompute=[5, 6],
        names=["a", "b"],
        parameter_bytes=[10, 20],
        saved_bytes=[30, 40],
        output_bytes=[50, 60],
    )
    first, second = profile.layers
    assert (second.forward_time, second.backward_time, second.recompute_time) == (2, 4, 6)
    assert (second.parameter_bytes, second.gradient_bytes) == (20, 20)
    assert profile.bytes_of(second.saved) == 40
    assert profile.bytes_of(second.outputs) == second.output_bytes == 60
    # A backward makes the gradient of what came in: nothing for the first layer.
    assert (first.backward_peak_bytes, second.backward_peak_bytes) == (0, 50)
    assert second.forward_peak_bytes == 40 + 60
    assert second.time == 6


@pytest.mark.parametrize(
    "column", ["backward", "recompute", "names", "parameter_bytes", "saved_bytes", "output_bytes"]
)
def test_from_costs_refuses_other_lengths(column: str) -> None:
    """Every cost is given per layer, or not at all."""
    with pytest.raises(ProfileError, match=rf"len\({column}\)=3 \(expected 2"):
        Profile.from_costs([1.0, 2.0], **{column: [1, 2, 3]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_time": -1.0}, "forward_time=-1.0"),
        ({"backward_time": math.nan}, "backward_time=nan"),
        ({"recompute_time": math.inf}, "recompute_time=inf"),
        ({"parameter_bytes": -1}, "parameter_bytes=-1"),
        ({"parameter_bytes": 1.5}, "parameter_bytes=1.5"),
        ({"optimizer_bytes": True}, "optimizer_bytes=True"),
        ({"forward_spread": "0"}, "forward_spread='0'"),
        ({"saved": (3,)}, r"storage=3 \(expected 0..1\)"),
        ({"outputs": (-1,)}, r"storage=-1 \(expected 0..1\)"),
    ],
)
def test_impossible_layer_is_refused(changes: dict[str, Any], message: str) -> None:
    """A time or size that no layer can have is refused, with the layer's name."""
    with pytest.raises(ProfileError, match=message) as caught:
        Profile((_layer(**changes),), storages=(8, 8))
    assert "layer 'conv'" in str(caught.value) and "\nFix: " in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, r"profile has no layers: len\(layers\)=0"),
        ({"storages": (-1,)}, "impossible value: 0=-1"),
        ({"inputs": (5,)}, "inputs names a storage that does not exist: storage=5"),
        ({"rows": -1}, "rows=-1"),
        ({"chunks": 1.0}, "chunks=1.0"),
        ({"step": StepTerms(loss_time=-1.0)}, "step has an impossible value: loss_time=-1.0"),
        ({"step": StepTerms(loss_bytes=0.5)}, "loss_bytes=0.5"),  # type: ignore[arg-type]
    ],
)
def test_impossible_profile_is_refused(changes: dict[str, Any], message: str) -> None:
    """A profile without layers, or with counts and terms that cannot be, is refused."""
    with pytest.raises(ProfileError, match=message):
        Profile(**{"layers": (_layer(),), "storages": (8,), **changes})


def test_bytes_of_counts_a_storage_once() -> None:
    """Two layers that save the same tensor hold it once: memory is a union, not a sum."""
    profile = Profile((_layer(saved=(0, 1)), _layer(saved=(1, 2))), storages=(10, 20, 40))
    together = [index for layer in profile.layers for index in layer.saved]
    assert profile.bytes_of(together) == 70
    assert sum(profile.bytes_of(layer.saved) for layer in profile.layers) == 90


def test_to_frame_has_one_row_per_layer() -> None:
    """The frame holds one row per layer, in order, with times in seconds and sizes in bytes."""
    profile = Profile.from_costs([1.0, 2.0], names=["a", "b"], saved_bytes=[30, 40], rows=5)
    frame = profile.to_frame()
    assert list(frame["layer"]) == [0, 1] and list(frame["name"]) == ["a", "b"]
    assert list(frame["forward_time"]) == [1.0, 2.0]
    assert list(frame["saved_bytes"]) == [30, 40] and list(frame["rows"]) == [5, 5]


def _record() -> dict[str, Any]:
    """Return a profile as JSON values."""
    return json.loads(json.dumps(Profile.from_costs([1.0, 2.0]).to_dict()))


def test_file_says_what_it_is_first() -> None:
    """Format and version stand at the head of the record."""
    record = _record()
    assert list(record)[:2] == ["format", "version"]
    assert (record["format"], record["version"]) == ("gpipebal-profile", 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.pop("layers"),
        lambda r: r.pop("step"),
        lambda r: r.update(layers=None),
        lambda r: r.update(layers=[]),
        lambda r: r.update(provenance=3),
        lambda r: r["layers"][0].pop("forward_time"),
        lambda r: r["layers"][0].pop("saved"),
        lambda r: r["layers"][0].update(forward_time="fast"),
        lambda r: r["layers"][0].update(name=3),
        lambda r: r["layers"][0].update(surprise=1),
        lambda r: r["layers"][0].update(saved=["x"]),
        lambda r: r["step"].update(surprise=1),
        lambda r: r.update(storages=[1.5]),
        lambda r: r.update(rows="4"),
    ],
)
def test_damaged_record_is_refused(damage: Any) -> None:
    """A record with a field missing, unknown, or of another type gives one clear error."""
    record = _record()
    damage(record)
    with pytest.raises(FileFormatError, match=r"profile is damaged: .+\nFix: profile the model"):
        Profile.from_dict(record)


def test_newer_file_is_refused(tmp_path: Path) -> None:
    """A profile of a later format is not guessed at."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**_record(), "version": 99}))
    with pytest.raises(FileFormatError, match="newer format: version=99"):
        Profile.load(path)


def test_with_step_changes_only_the_step() -> None:
    """Other step terms leave layers and provenance as they were."""
    profile = Profile.from_costs([1.0])
    step = StepTerms(loss_time=0.5)
    assert profile.with_step(step).step == step
    assert profile.with_step(step).with_step(profile.step) == profile


def test_text_of_a_profile_sums_it_up() -> None:
    """Printing a profile shows how many layers, where, and the totals."""
    profile = Profile.from_costs([1.0, 2.0], parameter_bytes=[1024, 1024], rows=4)
    assert str(profile) == (
        "Profile of 2 layers on costs, micro-batch of 4 rows: "
        "forward 3.00 s, backward 6.00 s, parameters 2.00 KiB"
    )
