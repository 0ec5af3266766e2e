"""Profile: what it holds, what it refuses, and that a file brings back every bit."""

from __future__ import annotations

import json
import math
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.profile import LayerProfile, Profile, SkipProfile, StepTerms, TieProfile

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
                handed_through=indices.map(tuple),
                through_gradient_storages=indices.map(tuple),
            ),
            min_size=1,
            max_size=4,
        )
    )
    losses = st.none() | st.builds(
        _layer, backward_time=TIMES, buffer_bytes=BYTES, saved=indices.map(tuple)
    )
    skips = st.builds(
        SkipProfile,
        name=st.text(max_size=5),
        source=st.just(0),
        destination=st.integers(0, len(layers) - 1),
        storages=indices.map(tuple),
    )
    inputs = draw(indices.map(tuple))
    profile = Profile(
        tuple(layers), tuple(storages), inputs, inputs[1:], rows=draw(st.integers(1, 9)),
        step=StepTerms(
            draw(st.none() | TIMES), draw(losses), draw(losses), draw(indices.map(tuple)),
            draw(st.none() | TIMES),
        ),
        skips=tuple(draw(st.lists(skips, max_size=2))),
        ties=draw(st.sampled_from([(), (TieProfile((0, 1), 0, 0),)])) if len(layers) > 1 else (),
        without_gradient=draw(indices.map(tuple)),
        provenance={"threads": draw(st.none() | st.integers(1, 8))},
    )  # fmt: skip
    others = draw(st.sets(st.integers(10, 20), max_size=2))
    return replace(
        profile, other_sizes=tuple(replace(profile, rows=rows) for rows in sorted(others))
    )


@settings(deadline=None, max_examples=30)
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


def test_a_subclass_may_have_evaluated_annotations() -> None:
    """A module of the user's need not keep annotations as texts, as those of the package do."""
    fields: list[Any] = [("mini_batch_rows", int | None, None), ("ties", tuple[Any, ...], ())]
    kind: Any = make_dataclass("Own", fields, bases=(Profile,), frozen=True)
    profile = Profile.from_costs([1.0, 2.0])
    loaded = kind.from_dict(profile.to_dict())
    assert type(loaded) is kind and loaded.to_dict() == profile.to_dict()
    assert replace(loaded, ties=[]).ties == ()


def test_from_costs_has_seconds_as_floats_and_bytes_as_whole_numbers() -> None:
    """Whatever kind of number is given, times are floats and sizes are ints."""
    (layer,) = Profile.from_costs([2], output_bytes=[np.int64(8)]).layers
    assert [type(layer.forward_time), type(layer.backward_time)] == [float, float]
    assert type(layer.recompute_time) is float and type(layer.output_bytes) is int


def test_from_costs_takes_arrays() -> None:
    """Costs may come as an array or a tensor, as `balance_cost` takes them."""
    as_list = Profile.from_costs([1.0, 2.5], output_bytes=[8, 16])
    for array in (np.array, torch.tensor):
        assert Profile.from_costs(array([1.0, 2.5]), output_bytes=array([8, 16])) == as_list


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
        Profile.from_costs([1.0, 2.0], **{column: list("abc") if column == "names" else [1, 2, 3]})


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
        ({"handed_through": (2,)}, r"storage=2 \(expected 0..1\)"),
        ({"gradient_storages": (2,)}, r"storage=2 \(expected 0..1\)"),
        ({"written": (2,)}, r"storage=2 \(expected 0..1\)"),
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
        ({"storages": (-1,)}, r"impossible value: storages\[0\]=-1"),
        ({"inputs": (5,)}, "inputs names a storage that does not exist: storage=5"),
        ({"without_gradient": (5,)}, "without_gradient names a storage .* storage=5"),
        ({"ties": (TieProfile((0,), 8, 8),)}, r"tied parameters have impossible layers: .*\[0\]"),
        ({"ties": (TieProfile((0, 1), 8, 8),)}, r"layers=\[0, 1\] \(expected two or more of 0..0"),
        ({"rows": -1}, "rows=-1"),
        ({"chunks": 1.0}, "chunks=1.0"),
        ({"chunks": 2**21}, r"too many micro-batches: chunks=2097152 \(expected at most 1048576"),
        ({"step": StepTerms(gather_time=-1.0)}, "step has an impossible value: gather_time=-1.0"),
        ({"step": StepTerms(loss=_layer(flops=0.5))}, r"step.loss has .* flops=0.5"),
        ({"step": StepTerms(gathered=(1,))}, "step.gathered names a storage .* storage=1"),
        ({"skips": (SkipProfile("s", 0, 1),)}, r"'s' names a layer .* layer=1 \(expected 0..0"),
        ({"skips": (SkipProfile("s", 0, 0, (9,)),)}, "skip connection 's' names a storage"),
        ({"skips": (SkipProfile("s", 0, 0, (), (9,)),)}, "'s' names a storage .* storage=9"),
        ({"other_sizes": (Profile((_layer(),)),)}, r"not in order: rows=\[1\] beside 1"),
        ({"other_sizes": (Profile((_layer(name="x"),), rows=2),)}, "of another chain: rows=2"),
    ],
)
def test_impossible_profile_is_refused(changes: dict[str, Any], message: str) -> None:
    """A profile without layers, or with counts and terms that cannot be, is refused."""
    with pytest.raises(ProfileError, match=message):
        Profile(**{"layers": (_layer(),), "storages": (8,), **changes})


def test_a_record_shares_nothing_with_its_profile() -> None:
    """Whoever changes a record, or what a profile was made from, leaves the profile as it is."""
    profile = Profile((_layer(),), (8, 8), rows=2, provenance={"flags": ["wide"]})
    profile = replace(profile, other_sizes=(replace(profile, rows=4),))
    before = json.dumps(profile.to_dict())
    record = profile.to_dict()
    again = Profile.from_dict(record)
    for each in (record, *record["other_sizes"]):
        each["provenance"]["flags"].append("sparse")
        each["layers"][0]["name"] = "other"
    assert json.dumps(profile.to_dict()) == json.dumps(again.to_dict()) == before


def test_lists_of_a_profile_are_as_in_its_file(tmp_path: Path) -> None:
    """Any iterable will do: the profile has a tuple of it, as one that is read."""
    layers = (_layer(saved=[0], parameter_bytes=8, gradient_bytes=8) for _ in range(2))
    profile = Profile(
        layers,  # type: ignore[arg-type]
        [8],  # type: ignore[arg-type]
        inputs=range(1),  # type: ignore[arg-type]
        skips=[SkipProfile("skip", 0, 1, [0], [0])],  # type: ignore[arg-type]
        ties=[TieProfile([0, 1], 8, 8)],  # type: ignore[arg-type]
        step=StepTerms(gathered=[0]),  # type: ignore[arg-type]
    )
    assert (profile.n_layers, profile.storages, profile.inputs) == (2, (8,), (0,))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


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


def test_to_frame_has_all_sizes_on_request() -> None:
    """With all sizes the frame holds every layer once per size, in ascending order of rows."""
    profile = Profile.from_costs([1.0, 2.0], rows=5)
    other = Profile.from_costs([0.5, 1.5], rows=2)
    frame = replace(profile, other_sizes=(other,)).to_frame(all_sizes=True)
    assert list(frame["rows"]) == [2, 2, 5, 5]
    assert list(frame["forward_time"]) == [0.5, 1.5, 1.0, 2.0]
    assert list(frame.columns) == list(profile.to_frame().columns)


def test_groups_of_an_optimizer_have_bytes_of_every_layer() -> None:
    """They are read as they were written."""
    profile = Profile.from_costs([1.0, 2.0])
    grouped = replace(profile, step=StepTerms(optimizer_groups=[[8, 0], [4, 4]]))  # type: ignore[arg-type]
    assert grouped.step.optimizer_groups == ((8, 0), (4, 4))
    assert Profile.from_dict(json.loads(json.dumps(grouped.to_dict()))) == grouped
    for group in ((8,), (8, -1), (8, 0.5)):
        with pytest.raises(ProfileError, match="optimizer_groups="):
            replace(profile, step=StepTerms(optimizer_groups=(group,)))  # type: ignore[arg-type]


def test_common_inputs_are_inputs() -> None:
    """What all micro-batches have in common goes into the chain."""
    profile = Profile((_layer(),), storages=(8, 4), inputs=(0, 1), common_inputs=(1,))
    assert (profile.input_bytes(1), profile.input_bytes(3)) == (12, 28)
    assert Profile.from_dict(profile.to_dict()) == profile
    with pytest.raises(ProfileError, match=r"common_inputs=\(1,\) \(expected some of inputs=\(0,"):
        Profile((_layer(),), storages=(8, 4), inputs=(0,), common_inputs=(1,))


def test_bad_ties_of_two_layers_are_refused() -> None:
    """Layers of a tie come once each, in their order; bytes are what bytes can be."""
    layers = (_layer(), _layer())
    for tie in (TieProfile((1, 0), 8, 8), TieProfile((0, 0), 8, 8), TieProfile((0, 1), -8, 8)):
        with pytest.raises(ProfileError, match="tied parameters ha"):
            Profile(layers, ties=(tie,))


def test_layers_have_what_is_tied() -> None:
    """Gradients of all ties are among every layer's; parameters may lie in an earlier layer's."""
    wide = _layer(gradient_bytes=12, parameter_bytes=12)
    narrow = _layer(name="head", gradient_bytes=12)
    ties = (TieProfile((0, 1), 8, 8), TieProfile((0, 1), 4, 4))
    assert Profile((wide, narrow), ties=ties).ties == ties
    with pytest.raises(ProfileError, match=r"layer 'head' .*: gradient_bytes=11 \(expected 12"):
        Profile((wide, replace(narrow, gradient_bytes=11)), ties=ties)
    assert Profile((replace(wide, parameter_bytes=11), narrow), ties=ties).ties == ties


def test_the_stored_profiles_are_readable() -> None:
    """Every profile that comes with the project can be read by this version."""
    paths = sorted((Path(gpipebal.__file__).parent.parent / "profiles").glob("*.json"))
    assert paths
    for path in paths:
        assert Profile.load(path).n_layers > 0


def _record() -> dict[str, Any]:
    """Return a profile as JSON values."""
    return json.loads(json.dumps(Profile.from_costs([1.0, 2.0]).to_dict()))


def test_file_says_what_it_is_first() -> None:
    """Format and version stand at the head of the record."""
    record = _record()
    assert list(record)[:2] == ["format", "version"]
    assert (record["format"], record["version"]) == ("gpipebal-profile", 16)


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
        lambda r: r["step"].update(loss=3),
        lambda r: r.update(surprise=1),
        lambda r: r.update(storages={}),
        lambda r: r.update(provenance=[]),
        lambda r: r.update(provenance=[["threads", 1]]),
        lambda r: r.update(format="gpipebal-plan"),
        lambda r: r.update(other_sizes=[{**r, "rows": 2, "other_sizes": [{**r, "rows": 3}]}]),
        lambda r: r["layers"][0].update(name="\ud800"),
        lambda r: r["layers"][0].update(forward_time=True),
        lambda r: r["layers"][0].update(flops=2**63),
        lambda r: r.update(storages=[1.5]),
        lambda r: r.update(rows="4"),
        lambda r: r.pop("without_gradient"),
        lambda r: r["step"].pop("turns"),
        lambda r: r.update(skips=[{"name": "s", "source": 0, "destination": 1, "storages": []}]),
        lambda r: r.update(ties=[{"layers": [0, 1]}]),
        lambda r: r.update(ties=[{"layers": 0, "parameter_bytes": 1, "gradient_bytes": 1}]),
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


@pytest.mark.parametrize("version", [1, 15])
def test_a_file_from_before_the_first_release_is_refused(version: int, tmp_path: Path) -> None:
    """It is not read as what it is not, and the error says how to get one that can be read."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**_record(), "version": version}))
    message = rf"before the first release: version={version} \(.* 16\)\.\nFix: profile the model"
    with pytest.raises(FileFormatError, match=message):
        Profile.load(path)
    with pytest.raises(
        FileFormatError, match=rf"version={version} \(expected .*, 16\)\.\nFix: prof"
    ):
        Profile.from_dict({**_record(), "version": version})


def test_text_of_a_profile_sums_it_up() -> None:
    """Printing a profile shows how many layers, where, and the totals."""
    profile = Profile.from_costs([1.0, 2.0], parameter_bytes=[1024, 1024], rows=4)
    assert str(profile) == (
        "Profile of 2 layers of given costs, micro-batch of 4 rows: "
        "forward 3.00 s, backward 6.00 s, parameters 2.00 KiB"
    )


def test_a_long_profile_does_not_fill_a_prompt() -> None:
    """A short one shows all of its fields, a long one a line; so does a plan."""
    short, long = (Profile.from_costs([1.0] * n) for n in (1, 500))
    assert repr(short).startswith("Profile(layers=(LayerProfile(name='0'")
    assert repr(long) == f"<{long}>" and "500 layers" in repr(long)
    plan = gpipebal.solve(long, 2)
    assert repr(plan) == f"<{str(plan).splitlines()[0]}>"
