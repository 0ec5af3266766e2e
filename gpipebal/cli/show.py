"""``gpipebal show``: print what a file of gpipebal holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpipebal.cli.words import Commands
from gpipebal.errors import FileFormatError
from gpipebal.files import read_any

__all__ = ["add_show"]


def add_show(commands: Commands) -> None:
    """Add the command to the parser."""
    show = commands.add_parser(
        "show",
        help="print a profile, plan or timeline",
        description="Print what a file holds: a profile (the layers and what they cost), a plan "
        "(the partitions), or a timeline (who worked when).",
        epilog="examples:\n"
        "  gpipebal show profile.json\n"
        "  gpipebal show profile.json --layers 400\n"
        "  gpipebal show gpipebal-run/plan.json gpipebal-run/timeline.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(command=_show)
    show.add_argument("files", metavar="FILE", nargs="+", help="a file that gpipebal has written")
    show.add_argument(
        "--layers",
        type=int,
        metavar="N",
        default=30,
        help="layers of a profile to print, the slowest ones (default: %(default)s)",
    )
    show.add_argument("--json", action="store_true", help="print the content as JSON")


def _show(options: argparse.Namespace) -> None:
    # All are read before the first is printed: a bad one is said at once.
    nouns = [_load(path) for path in options.files]
    for k, noun in enumerate(nouns):
        if options.json:
            print(json.dumps(noun.to_dict()))
        else:
            print(("\n" if k else "") + _text(noun, options.layers))


def _load(path: str) -> Any:
    from gpipebal.plan import Plan
    from gpipebal.profile import Profile
    from gpipebal.timeline import Timeline

    kinds: dict[str, type[Profile | Plan | Timeline]] = {
        "gpipebal-profile": Profile,
        "gpipebal-plan": Plan,
        "gpipebal-timeline": Timeline,
    }
    record = read_any(path)
    # A timeline is a Chrome trace, with the exact record under a key of its own.
    inner = record.get("gpipebal", record)
    kind = kinds.get(inner.get("format", "")) if isinstance(inner, dict) else None
    if kind is None:
        raise FileFormatError(
            f"file is no profile, plan or timeline: file={str(path)!r}.\n"
            "Fix: name a file that gpipebal profile or gpipebal run has written."
        )
    return kind.load(path)


def _text(noun: Any, n_layers: int) -> str:
    from gpipebal.profile import Profile
    from gpipebal.tables import profile_table

    return profile_table(noun, n_layers) if isinstance(noun, Profile) else str(noun)
