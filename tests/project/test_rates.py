"""Rates of devices: the table, and finding a device in it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpipebal.errors import DeviceError
from gpipebal.rates import RATES, DeviceRates, find_rates


@pytest.mark.parametrize("name", RATES)
def test_the_table_is_plausible(name: str) -> None:
    """Every device has a source, and fewer bits are never slower."""
    rates = RATES[name]
    assert (rates.name, find_rates(name), bool(rates.source)) == (name, rates, True)
    order = ("float64", "float32", "tensorfloat32", "float16", "float8_e4m3fn")
    known = [rates.flops[dtype] for dtype in order if dtype in rates.flops]
    assert known == sorted(known)
    assert 1e9 < rates.bandwidth < min(rates.flops.values())
    assert (rates.device_type == "cpu") == (rates.host_time is None)


def test_the_issue_names_its_devices() -> None:
    """The devices that users asked for are in the table, with dense rates."""
    expected = {
        "H100 SXM": 989.4e12,
        "H200": 989.4e12,
        "A100 80GB SXM": 312e12,
        "L40S": 362.05e12,
        "V100 SXM2": 125e12,
        "RTX 4090": 165.2e12,
    }
    assert {name: RATES[name].flops_of("float16") for name in expected} == expected
    assert "CPU core" in RATES


@pytest.mark.parametrize("name", ["h100", "H100-SXM", "h100sxm", " H 100 "])
def test_names_are_found_as_people_write_them(name: str) -> None:
    """Case, spaces and hyphens do not matter, nor the end of the name."""
    assert find_rates(name) is RATES["H100 SXM"]


@pytest.mark.parametrize("name", ["h", "", "abacus", None, 100])
def test_other_names_are_refused(name: Any) -> None:
    """What fits no device, or several, is refused with all names; the advice works."""
    with pytest.raises(DeviceError, match="Fix: ") as error:
        find_rates(name)
    if isinstance(name, str):
        assert "'RTX 4090'" in str(error.value)
    assert find_rates(DeviceRates("own", {"float32": 1e13}, bandwidth=1e12)).name == "own"


@pytest.mark.parametrize(
    "changes",
    [
        {"flops": {}},
        {"flops": {"float16": 1.0}},
        {"flops": {"float32": -1.0}},
        {"flops": {"float32": math.inf}},
        {"bandwidth": 0.0},
        {"bandwidth": math.nan},
        {"bandwidth": True},
        {"memory_bytes": -1},
        {"launch_time": -1.0},
        {"host_time": math.nan},
        {"device_type": "abacus"},
        {"has_flash": "yes"},
    ],
)
def test_impossible_rates_are_refused(changes: dict[str, Any]) -> None:
    """Rates that are no positive numbers are refused, and the error names the device."""
    given = {"name": "own", "flops": {"float32": 1e12}, "bandwidth": 1e11, **changes}
    with pytest.raises(DeviceError, match="'own'"):
        DeviceRates(**given)


def test_shares_of_the_peaks() -> None:
    """Scaled rates reach their share of arithmetic and bandwidth, and say so in their name."""
    half = find_rates("h200").scaled(flops=0.5, bandwidth=0.25)
    assert half.flops_of("bfloat16") == 989.4e12 / 2
    assert half.bandwidth == 4.8e12 / 4
    assert half.name == "H200 at 0.5 of its operations and 0.25 of its bandwidth"


def test_missing_dtypes_have_the_rate_of_float32() -> None:
    """A dtype without units of its own runs as float32."""
    assert RATES["V100 SXM2"].flops_of("bfloat16") == 15.7e12


def test_flash_attention_goes_by_bfloat16_unless_told() -> None:
    """A device that is older than bfloat16 has no flash attention; the user knows better."""
    assert RATES["A100 80GB SXM"].has_flash and not RATES["V100 SXM2"].has_flash
    own = DeviceRates("own", {"float32": 1e12}, 1e11, has_flash=True)
    assert own.has_flash and own.scaled(flops=0.5).has_flash
