"""The ledger's benchmark: its tables are its results, and it tells what differs."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_files import assert_in_readme, folder_of, script_of, stored

folder_of("ledger")

import ledger_tables as tables  # noqa: E402


def test_the_readme_says_what_is_stored() -> None:
    """Its tables are made from the results, and from nothing else."""
    assert_in_readme("ledger", tables.blocks(stored("ledger")))


def test_what_differs_is_counted_and_listed() -> None:
    """By samples and by operators; a few numbers more or less are no difference."""
    assert [tables.difference([1000, n]) for n in (1000, 1064, 1100, 900)] == [0, 0, -100, 100]
    operators: list[dict[str, Any]] = [
        {"name": "a", "samples": 4, "forward": [], "backward": [[300, 100], [100, 400]]},
        {"name": "b", "samples": 2, "forward": [[0, 90]], "backward": []},
    ]
    lines = tables.summary({"operators": operators}).splitlines()
    assert lines[1].split() == ["forward", "6", "5", "1", "0", "2", "1", "0"]
    assert lines[2].split() == ["backward", "6", "4", "1", "1", "2", "1", "1"]


def test_operators_are_counted_as_the_allocator_reports() -> None:
    """Those that pick elements and a loss agree; a product, which torch computes otherwise, not."""
    pytest.importorskip("expecttest", reason="torch's samples need the package expecttest")
    record = script_of("ledger").measure(["gather", "nn.functional.mse_loss", "prod"])
    found = {operator["name"]: operator for operator in record["operators"]}
    assert not found["nn_functional_mse_loss"]["backward"]
    assert len(found["gather"]["backward"]) < found["gather"]["samples"]
    assert any(tables.difference(peaks) > 0 for peaks in found["prod"]["backward"])
