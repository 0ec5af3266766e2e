"""Every kind of event is shown wherever a timeline is: in pictures, traces, reports and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from gpipebal.errors import ProfileError, UsageError
from gpipebal.html import timeline_html
from gpipebal.plots import plot_timeline
from gpipebal.plots.style import kind_style
from gpipebal.schedule.actions import ACTION_NAMES, KINDS
from gpipebal.timeline import (
    ALL_KINDS,
    COMPUTE_KINDS,
    EVENT_KINDS,
    KIND_NAMES,
    Event,
    EventKind,
    Timeline,
    kind_of,
)
from gpipebal.timeline.chrome import trace_events
from gpipebal.timeline.text import draw_rows

mpl.use("Agg")

KIND = pytest.mark.parametrize("kind", EVENT_KINDS, ids=lambda kind: kind.name)


def with_one(kind: EventKind) -> Timeline:
    """Make a timeline of a forward and one event of a kind, which takes a quarter of the time."""
    other = Event(0, kind.letter, 0, 3.0, 4.0)
    return Timeline((Event(0, "F", 0, 0.0, 3.0), other), 1)


def test_the_table_has_every_kind_once_and_actions_first() -> None:
    """Letters and names are all different; actions are numbered as in a schedule."""
    letters = [kind.letter for kind in EVENT_KINDS]
    assert "".join(letters) == ALL_KINDS == "".join(dict.fromkeys(letters))
    assert len(set(KIND_NAMES.values())) == len(EVENT_KINDS)
    assert ALL_KINDS.startswith(KINDS)
    assert {letter: KIND_NAMES[letter] for letter in KINDS} == ACTION_NAMES
    assert all(kind_of(kind.letter) is kind for kind in EVENT_KINDS)
    assert [kind.letter for kind in EVENT_KINDS if kind.computes] == list(COMPUTE_KINDS)


@KIND
def test_a_picture_draws_it(kind: EventKind) -> None:
    """There is a bar at its time, and an entry of the legend with its name."""
    ax = plot_timeline(with_one(kind))
    boxes = [
        (path.get_extents().x0, path.get_extents().x1)
        for bars in ax.collections
        for path in bars.get_paths()
    ]
    assert any(box == pytest.approx((3.0, 4.0)) for box in boxes)
    figure: Any = ax.get_figure()
    legends = [*figure.legends, *([ax.get_legend()] if ax.get_legend() else [])]
    texts = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert kind.name in texts
    plt.close(figure)


@KIND
def test_a_trace_has_it_on_one_named_track(kind: EventKind, tmp_path: Path) -> None:
    """A slice of the Chrome trace has its name, and its track has a name too."""
    path = tmp_path / "trace.json"
    with_one(kind).save(path)
    trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    (piece,) = [e for e in trace if e["ph"] == "X" and e["ts"] == 3e6]
    assert piece["cat"] == kind.name
    (name,) = [
        e["args"]["name"] for e in trace if e["name"] == "thread_name" and e["tid"] == piece["tid"]
    ]
    assert (
        name
        == {
            "partition": "partition 0",
            "copies": "partition 0: copies in",
            "host": "host: launches",
        }[kind.track]
    )


@KIND
def test_a_report_shows_it(kind: EventKind) -> None:
    """Work is a part of the bar; what runs beside it is told below the table."""
    text = with_one(kind)._repr_html_()
    widths = [float(part.split("px")[0]) for part in text.split("height:9px;width:")[1:]]
    if kind.computes:
        assert sum(widths) == pytest.approx(160.0)
        assert str(kind.column) in text
        assert "beside the work" not in text
    else:
        assert sum(widths) == pytest.approx(120.0)
        assert f"beside the work of the devices: {kind.name} 1.00 s" in text


@KIND
def test_a_drawing_in_text_shows_it(kind: EventKind) -> None:
    """Work has a symbol, which the headline explains; launches have a line of their own."""
    headline, *rows = with_one(kind).text_gantt(width=4).splitlines()
    if kind.computes:
        assert rows == [f"partition 0  000{kind.symbols[0]}"]
        assert kind.name in headline
    else:
        assert rows[0] == "partition 0  000."
        assert len(rows) == 1 + (kind.track == "host")


def test_unknown_kinds_are_refused_everywhere() -> None:
    """Nothing that shows a timeline leaves an event out because its kind is new."""
    events = (Event(0, "X", 0, 0.0, 1.0),)

    class Noun:
        """As much of a timeline as the report needs."""

        n_devices, makespan, placement, devices = 1, 1.0, (0,), None

    Noun.events = events  # type: ignore[attr-defined]  # past the checks of a Timeline
    for show in (
        lambda: Timeline(events, 1),
        lambda: trace_events(events, 1, 1, "new"),
        lambda: timeline_html(Noun(), kind_of),
        lambda: draw_rows(events, 1, 10),
    ):
        with pytest.raises(ProfileError, match="kind='X'"):
            show()
    with pytest.raises(UsageError, match="kind of event has no style: kind='X'"):
        kind_style((0.0, 0.0, 0.0), "X")


@pytest.mark.parametrize(
    "half",
    [
        {},
        {"symbols": "x" * 10, "of_several": "x"},
        {"column": "forward"},
        {"track": "host", "column": "forward"},
        {"symbols": "x", "of_several": "x", "column": "forward"},
    ],
)
def test_a_kind_that_is_half_known_is_refused(half: dict[str, Any]) -> None:
    """What a device computes has symbols and a column; what runs beside it has neither."""
    with pytest.raises(ProfileError, match="half known"):
        EventKind("X", "new", **half)
