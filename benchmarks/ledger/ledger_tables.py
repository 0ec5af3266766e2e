"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from typing import Any

from benchmark_tools.machine import describe_counts
from benchmark_tools.text import block, table

FORMAT = "gpipebal-benchmark-ledger"
VERSION = 1

#: Bytes of the numbers that an operation may make for itself: no difference.
SMALL = 64

#: Operators that are listed where more differ.
_MOST = 24


def difference(peaks: list[int]) -> int:
    """Return by how many bytes the ledger counts more than the allocator reports; 0: hardly."""
    counted, allocated = peaks
    return 0 if abs(counted - allocated) <= SMALL else counted - allocated


def summary(record: dict[str, Any]) -> str:
    """Say how many samples agree, and which operators differ."""
    rows = []
    for phase in ("forward", "backward"):
        n_all = sum(operator["samples"] for operator in record["operators"])
        n_more = [_n_more(operator[phase]) for operator in record["operators"]]
        n_less = [
            len(operator[phase]) - more
            for operator, more in zip(record["operators"], n_more, strict=True)
        ]
        n_agree = sum(not operator[phase] for operator in record["operators"])
        counts = [
            *(n_all, n_all - sum(n_less) - sum(n_more), sum(n_less), sum(n_more)),
            *(len(n_more), n_agree, sum(map(bool, n_more))),
        ]
        rows.append([phase, *(f"{number:,}" for number in counts)])
    header = ["phase", "samples", "agree", "less", "more", "operators", "agree", "more"]
    return table(header, rows, left=[0])


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the blocks of the README by their names."""
    about = record["provenance"]
    return {
        "result": block(summary(record)),
        "more": block(_listed(record["operators"], more=True)),
        "less": block(_listed(record["operators"], more=False)),
        "environment": f"{describe_counts(about)}; {about['minutes']} minutes.",
    }


def _n_more(differing: list[list[int]]) -> int:
    return sum(difference(peaks) > 0 for peaks in differing)


def _listed(operators: list[dict[str, Any]], *, more: bool) -> str:
    """List operators for whose backward the ledger counts more, or less: by the farthest sample."""
    found = []
    for operator in operators:
        differ = [peaks for peaks in operator["backward"] if (difference(peaks) > 0) is more]
        if differ:
            counted, allocated = max(differ, key=lambda peaks: abs(difference(peaks)) / max(peaks))
            found.append((operator["name"], len(differ), operator["samples"], counted, allocated))
    found.sort(key=lambda row: -abs(row[3] - row[4]) / max(row[3], row[4]))
    rows = [
        [name, f"{n_differ} of {n_all}", f"{counted:,}", f"{allocated:,}"]
        for name, n_differ, n_all, counted, allocated in found[:_MOST]
    ]
    text = table(["operator", "samples", "ledger", "allocator"], rows, left=[0])
    return text if len(found) <= _MOST else f"{text}\nand {len(found) - _MOST} more operators"
