"""What a notebook shows of a profile, a plan and a timeline: small, escaped, well-formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from plot_cases import make_case

from gpipebal.html import Bar, table
from gpipebal.plan import Plan
from gpipebal.planner import evaluate, solve
from gpipebal.profile import Profile
from gpipebal.simulator import simulate
from gpipebal.timeline import Event, Timeline

#: Bytes that a cell of a notebook may keep.
LARGEST = 30_000


class Reader(HTMLParser):
    """Reads cells, and the widths of the parts of every bar in pixels."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.bars: list[list[float]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        style = dict(attributes).get("style") or ""
        if tag == "tr":
            self.rows.append([])
        self._in_cell = self._in_cell or tag in ("td", "th")
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "div" and "line-height:0" in style:
            self.bars.append([])
        if tag == "span" and "width:" in style:
            width = style.split("width:")[1].split("px")[0]
            self.bars[-1].append(float(width))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def html_of(noun: Profile | Plan | Timeline) -> str:
    """Return what a notebook shows, which must be well-formed."""
    text = noun._repr_html_()
    ElementTree.fromstring(text.replace("&ensp;", " ").replace("&#9632;", "#"))
    return text


@pytest.mark.parametrize("size", [(1, 1, 1), (24, 4, 8), (370, 64, 8)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 0.0])
def test_every_noun_shows_itself(size: tuple[int, int, int], scale: float) -> None:
    """Few layers or many, with times or without: a small table, one bar in every row."""
    profile, plan = make_case(*size, scale=scale)
    for noun in (profile, plan, simulate(plan)):
        text = html_of(noun)
        assert len(text) < LARGEST
        found = Reader(text)
        assert 2 <= len(found.rows) <= 25
        assert len({len(row) for row in found.rows}) == 1
        assert len(found.bars) == len(found.rows) - 1
        assert all(sum(bar) <= 160.5 for bar in found.bars)


def test_text_beside_the_html_is_short() -> None:
    """Where no HTML is shown, a notebook has the noun's own text and not a list of its fields."""
    profile, plan = make_case(24, 4, 8)
    for noun in (profile, plan, simulate(plan)):
        said: list[str] = []
        printer = SimpleNamespace(text=said.append)
        noun._repr_pretty_(printer, False)
        assert said == [str(noun)]


def test_profile_bars_are_times() -> None:
    """The slowest layer fills its cell, the others are in proportion, forward before backward."""
    found = Reader(html_of(Profile.from_costs([1.0, 2.0], [1.0, 6.0], names=["a", "b"])))
    assert found.bars == [[20.0, 0.0, 20.0], [40.0, 0.0, 120.0]]
    assert found.rows[1] == ["0", "a", "Layer", "", "1.00 s", "1.00 s", "0 B", "0 B"]


def test_profile_shows_the_slowest_layers() -> None:
    """Of many layers the slowest are shown, in the order of the chain, and the rest is told."""
    text = html_of(Profile.from_costs([float(k) for k in range(30)]))
    assert [row[0] for row in Reader(text).rows[1:]] == [str(k) for k in range(6, 30)]
    assert "6 layers with less time not shown: together 3.4 %" in text


def test_plan_bars_are_times_of_partitions() -> None:
    """The bottleneck fills its cell; recompute is there where the plan does it."""
    plan = make_case(6, 2, 3, "always")[1]
    found = Reader(html_of(plan))
    assert found.bars[0] == [40.0, 40.0, 80.0]
    assert sum(found.bars[1]) == pytest.approx(160 * 28 / 36, rel=1e-2)
    assert found.rows[1][:3] == ["0", "3", "0 … 2"]
    assert str(plan).splitlines()[-1] in html_of(plan)


def test_timeline_bars_are_shares_of_the_makespan() -> None:
    """A device's bar is what it spends of the makespan on each kind of work."""
    events = (Event(0, "F", 0, 0, 1), Event(0, "B", 0, 2, 4), Event(1, "F", 0, 1, 2))
    found = Reader(html_of(Timeline((*events, Event(1, "C", 0, 0.5, 1)), 2)))
    assert found.bars == [[40.0, 0.0, 80.0, 0.0], [40.0, 0.0, 0.0, 0.0]]
    assert found.rows[1] == ["0", "", "1.00 s", "-", "2.00 s", "25.0 %"]


def test_a_kind_of_work_has_one_colour() -> None:
    """Forward, recompute and backward look the same in every table that has them."""
    profile, plan = make_case(6, 2, 3, "always")
    seen: dict[str, set[str]] = {}
    for noun in (profile, plan, simulate(plan)):
        for colour, name in re.findall(r"color:(#\w+)\">&#9632;</span> (\w+)", html_of(noun)):
            seen.setdefault(name, set()).add(colour)
    assert set(seen) == {"forward", "recompute", "backward"}
    assert len({*map(min, seen.values())}) == 3 == sum(map(len, seen.values()))


def test_names_are_escaped() -> None:
    """A layer's name is text, whatever it looks like."""
    name = "<script>alert('x')</script>&\""
    text = html_of(Profile.from_costs([1.0], names=[name]))
    assert "<script" not in text and Reader(text).rows[1][1] == name
    assert "<b>" not in table("<b>", ["<b>"], [["<b>", Bar((2.0, -1.0), "<b>'\"")]], footer=["<b>"])


def test_lines_in_names_break_no_table() -> None:
    """A name of several lines is in one cell, also where the text of a plan is read."""
    names = ["x\ny", "p\u2028q", "c\x0bd", "d"]
    plan = evaluate(Profile.from_costs([1.0] * 4, names=names, chunks=2), [1, 1, 2])
    assert len(str(plan).splitlines()) == 1 + 4 + len(str(plan).splitlines()[5:])
    assert "x y" in str(plan).splitlines()[2]
    found = Reader(html_of(plan))
    assert len(found.rows) == 4
    assert "<div>d .. d" not in html_of(plan) and "q  1.00 s" not in html_of(plan)


@pytest.mark.parametrize("events", [(), (Event(0, "F", 0, 0.0, 0.0),)])
def test_without_time_nobody_is_idle(events: tuple[Event, ...]) -> None:
    """The rows say what the headline says: no bubble."""
    found = Reader(html_of(Timeline(events, 1)))
    assert found.rows[1][-1] == "0.0 %"


def test_a_bar_never_leaves_its_cell() -> None:
    """Lengths that cannot be are cut off."""
    found = Reader(table("", ["", ""], [["", Bar((0.75, 0.75, -3.0))]]))
    assert found.bars == [[120.0, 40.0, 0.0]]


def test_what_is_not_shown_of_equal_rows_has_no_less_time() -> None:
    """Of rows that all take as long, some are left out all the same."""
    text = solve(Profile.from_costs([1.0] * 60), 30)._repr_html_()
    assert "6 partitions with no more time not shown" in text


def test_devices_are_looked_up_once_and_not_for_every_event() -> None:
    """A timeline of a thousand partitions makes a list of as many whenever it is asked for it."""
    asked: list[int] = []

    class Asked(Timeline):
        @property
        def placement(self) -> tuple[int, ...]:
            asked.append(1)
            return super().placement

    whole = simulate(solve(Profile.from_costs([1.0] * 4, chunks=50), 4))
    timeline = Asked(whole.events, whole.n_partitions)
    asked.clear()
    assert timeline._repr_html_() == whole._repr_html_()
    assert len(asked) < 5
