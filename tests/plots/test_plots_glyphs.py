"""Names in any script: in a font that has their characters, else as escapes, and no warnings.

Warnings are errors in these tests, and matplotlib warns of every glyph that it does not find.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.font_manager import fontManager
from plot_cases import check_layout
from plots.test_plots_readable import figure_of

import gpipebal as gb
from gpipebal.plots import (
    plot_balance,
    plot_chunks,
    plot_memory,
    plot_partitions,
    plot_profile,
    plot_schedules,
    plot_timeline,
    plot_timelines,
    save_figure,
)
from gpipebal.plots.glyphs import families, pieces, written
from gpipebal.simulator import held_of, memory_over_time

#: No font has these: they are for private use.
FOREIGN = "\ue4a0\U0010fffd"
ESCAPED = r"\ue4a0\U0010fffd"


@pytest.fixture
def font(tmp_path: Path) -> Iterator[str]:
    """Install a font with square glyphs for what no other font has."""
    before = list(fontManager.ttflist)
    pen = TTGlyphPen(None)
    for step in (pen.moveTo, pen.lineTo, pen.lineTo):
        step((900 * (step == pen.lineTo), 900 * (step == pen.moveTo)))
    pen.lineTo((0, 0))
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "one", "two"])
    builder.setupCharacterMap({ord(FOREIGN[0]): "one", ord(FOREIGN[1]): "two"})
    builder.setupGlyf(dict.fromkeys([".notdef", "one", "two"], pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", "one", "two"], (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Foreign", "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    path = tmp_path / "foreign.ttf"
    builder.save(path)
    fontManager.addfont(path)
    yield "Foreign"
    fontManager.ttflist[:] = before


def case() -> tuple[gb.Profile, gb.Plan]:
    """Plan a chain whose layers have names of many scripts."""
    names = [
        "层一",
        "слой",
        f"注意力{FOREIGN}",
        "العربية",
        "हिन्दी",
        "a\nb\t\u202ec",
        "é$x$",
        "名" * 50,
    ]
    profile = gb.Profile.from_costs(
        [1e-3] * 8, saved_bytes=[1000] * 8, names=names, rows=2, chunks=4
    )
    return profile, gb.solve(profile, 2)


def named_schedules(profile: gb.Profile) -> gb.simulator.ScheduleTable:
    """Compare schedules, as if they had other names."""
    table = gb.compare_schedules(profile, 2)
    rows = tuple(replace(row, schedule=f"层 {row.schedule}") for row in table.rows)
    return replace(table, rows=rows)


DRAWERS: dict[str, Callable[[gb.Profile, gb.Plan], Axes]] = {
    "profile": lambda profile, plan: plot_profile(profile),
    "profile-memory": lambda profile, plan: plot_profile(profile, by="memory"),
    "balance": plot_balance,
    "partitions": lambda profile, plan: plot_partitions(plan),
    "timeline": lambda profile, plan: plot_timeline(gb.simulate(plan)),
    "timelines": lambda profile, plan: plot_timelines(
        {"一号": gb.simulate(plan), f"二号{FOREIGN}" * 50: gb.simulate(plan)}
    ),
    "memory": lambda profile, plan: plot_memory(
        memory_over_time(gb.simulate(plan), held_of(profile, plan))
    ),
    "chunks": lambda profile, plan: plot_chunks([plan]),
    "schedules": lambda profile, plan: plot_schedules(named_schedules(profile)),
}


@pytest.mark.parametrize("draw", DRAWERS.values(), ids=DRAWERS)
def test_no_picture_warns_of_glyphs(
    draw: Callable[[gb.Profile, gb.Plan], Axes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Drawing and saving names of any script says nothing, and nothing is cut off or overlaps."""
    caplog.set_level(logging.WARNING)
    ax = draw(*case())
    check_layout(figure_of(ax))
    for suffix in ("png", "svg"):
        save_figure(ax, tmp_path / f"picture.{suffix}")
        assert not caplog.records, suffix


def labels_of(names: list[str]) -> list[str]:
    """Return what stands below the bars of layers with these names."""
    ax = plot_profile(gb.Profile.from_costs([1e-3] * len(names), names=names))
    check_layout(figure_of(ax))
    return [label.get_text() for label in ax.get_xticklabels()]


def test_what_no_font_has_is_written_as_an_escape() -> None:
    """Escapes stand for single characters, and are not cut in their middle."""
    assert written(f"a{FOREIGN}") == f"a{ESCAPED}"
    assert labels_of([f"a{FOREIGN}", "слой"]) == [f"a{ESCAPED}", "слой"]
    (long,) = labels_of([FOREIGN[0] * 99])
    assert long == r"\ue4a0\ue4a0…\ue4a0"
    assert families("layer") == families("")


def test_a_font_that_has_the_characters_is_used(font: str, tmp_path: Path) -> None:
    """What an installed font has is not escaped: it is drawn with that font, as wide as it is."""
    assert pieces(FOREIGN) == list(FOREIGN)
    assert families(FOREIGN) == [*families(""), font]
    profile = gb.Profile.from_costs([1e-3] * 2, names=[FOREIGN * 2, "слой"])
    ax = plot_profile(profile)
    first = ax.get_xticklabels()[0]
    assert first.get_text() == FOREIGN * 2
    figure_of(ax).draw_without_rendering()
    assert first.get_window_extent().width > 2.5 * first.get_window_extent().height
    save_figure(ax, tmp_path / "picture.svg")


def test_a_font_that_is_installed_later_is_found(request: pytest.FixtureRequest) -> None:
    """Nothing that was found out about fonts outlives a change of them."""
    assert written(FOREIGN) == ESCAPED
    request.getfixturevalue("font")
    assert written(FOREIGN) == FOREIGN


def test_settings_of_fonts_are_followed(font: str) -> None:
    """The family that a user has set comes first, and others only for what it has not."""
    with rc_context({"font.family": [font]}):
        assert families(FOREIGN) == [font]
        assert families("a") == [font, "DejaVu Sans"]
        assert written(f"{FOREIGN}a") == f"{FOREIGN}a"
    with rc_context({"font.family": "sans-serif", "font.sans-serif": [font, "DejaVu Sans"]}):
        assert families("a") == ["sans-serif", "DejaVu Sans"]
