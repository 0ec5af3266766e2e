"""Units: what people read, and what they may write."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import UsageError
from gpipebal.text import aligned
from gpipebal.units import format_bytes, format_percent, format_seconds, parse_bytes

SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.0, "1.00 s"),
        (0.9996, "1.00 s"),
        (0.9994, "999 ms"),
        (0.0123, "12.3 ms"),
        (9.996e-4, "1.00 ms"),
        (9.995e-4, "1.00 ms"),
        (9.994e-4, "999 us"),
        (1.5e-6, "1.50 us"),
        (9.996e-7, "1.00 us"),
        (9.994e-7, "999 ns"),
        (4e-9, "4.00 ns"),
        (-4e-9, "-4.00 ns"),
        (9.996e-10, "1.00 ns"),
        (1e-12, "1.00 ps"),
        (9.996e-13, "1.00 ps"),
        (5e-324, "4.94e-324 s"),
        (86400.0, "86400 s"),
        (1e300, "1.00e+300 s"),
        (-0.0, "0 s"),
        (123.4, "123 s"),
        (-0.0123, "-12.3 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_format_seconds_picks_the_unit(seconds: float, text: str) -> None:
    """A duration is shown with three digits and never as 1000 of a smaller unit."""
    assert format_seconds(seconds) == text


@given(st.floats(1e-12, 1e4) | st.floats(-1e4, -1e-12))
def test_format_seconds_keeps_three_digits(seconds: float) -> None:
    """What is shown is within half of the last of three digits."""
    number, unit = format_seconds(seconds).split()
    assert float(number) * SECONDS_PER_UNIT[unit] == pytest.approx(seconds, rel=5.1e-3)
    assert abs(float(number)) < 1000 or unit == "s"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**60, "1024 PiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_bytes_picks_the_unit(n_bytes: int, text: str) -> None:
    """A size is shown with three digits in a binary unit."""
    assert format_bytes(n_bytes) == text


def test_format_percent_has_one_decimal() -> None:
    """A fraction of one is shown as a percentage."""
    assert format_percent(0.1234) == "12.3 %"
    assert format_percent(-0.05) == "-5.0 %"
    assert format_percent(-1e-17) == "0.0 %"


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (0, 0),
        (42, 42),
        ("42", 42),
        ("16 GiB", 16 * 2**30),
        (" 1.5kib ", 1536),
        ("500MB", 500_000_000),
        ("7 b", 7),
        ("9007199254740993", 2**53 + 1),
        (" 8388608.000000001 GiB", 2**53 + 1),
        ("0.1 kb", 100),
    ],
)
def test_parse_bytes_reads_numbers_and_units(text: int | str, n_bytes: int) -> None:
    """A size is a number of bytes, or a number with a binary or decimal unit."""
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", [-1, True, "", "GiB", "1 GiBB", "-1 GiB", "1e3", "16 G", None])
def test_parse_bytes_refuses_what_is_no_size(text: object) -> None:
    """What is not a size is refused, with the text in the message."""
    message = re.escape(f"size is not readable: size={text!r}")
    with pytest.raises(UsageError, match=message):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(0, 10**308), st.sampled_from(["", " B"]))
def test_parse_bytes_keeps_every_byte(n_bytes: int, unit: str) -> None:
    """Also beyond 2**53, above which a float has no odd numbers."""
    assert parse_bytes(f"{n_bytes}{unit}") == n_bytes


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 10_000, "0." + "1" * 10_000])
def test_parse_bytes_refuses_more_digits_than_sizes_have(digits: str) -> None:
    """Whatever the interpreter's own limit for digits is."""
    with pytest.raises(UsageError, match="size is not readable"):
        parse_bytes(digits)


@given(st.integers(0, 2**49))
def test_parse_bytes_reads_what_format_bytes_writes(n_bytes: int) -> None:
    """Reading back a shown size gives it within the digits that were shown."""
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=5.1e-3)


def test_suggested_fix_for_a_size_works() -> None:
    """The sizes that the error suggests are sizes."""
    with pytest.raises(UsageError, match="Fix: write it as") as caught:
        parse_bytes("much")
    for text in re.findall(r"'([^']+)'", str(caught.value).split("Fix:")[1]):
        assert parse_bytes(text) > 0


@pytest.mark.parametrize(
    "text",
    [
        str(gb.compare_schedules(gb.Profile.from_costs([1.0]), 1)),
        str(gb.solve_grid(gb.Profile.from_costs([1.0]), 1)),
        str(gb.solve(gb.Profile.from_costs([1.0]), 1)),
        str(gb.Profile.from_costs([1.0])),
    ],
    ids=lambda text: text[:20],
)
def test_one_is_no_plural(text: str) -> None:
    """Tables of one device, one layer, one row and one micro-batch say so."""
    assert not re.search(r"\b1 (devices|layers|rows|micro-batches|partitions)\b", text)


def test_columns_stand_below_each_other_whatever_is_written_in_them() -> None:
    """Wide characters take two places, accents and emoji's joiners none."""
    lines = aligned([["name", "t"], ["日本語", "1"], ["e\u0301", "2"], ["か\u3099", "3"]])
    assert lines == ["name    t", "日本語  1", "e\u0301       2", "か\u3099      3"]
