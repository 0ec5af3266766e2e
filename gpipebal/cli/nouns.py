"""Files in, tables and pictures out: what the commands that need no model share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from gpipebal.cli.words import check_output
from gpipebal.errors import FileFormatError, UsageError
from gpipebal.files import read_any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpipebal.plan import Plan
    from gpipebal.profile import Profile
    from gpipebal.timeline import Timeline

    Noun: TypeAlias = Profile | Plan | Timeline

__all__ = ["check_plot", "load_noun", "save_plot"]


def load_noun(path: str, *kinds: str) -> Noun:
    """Read a profile, a plan or a timeline, whichever the file holds.

    Args:
        path: A file that gpipebal wrote.
        kinds: What is of use here, such as ``'plan'``; none: all of them.

    Raises:
        FileFormatError: the file cannot be read, is damaged, or holds something else.
    """
    from gpipebal.plan import Plan
    from gpipebal.profile import Profile
    from gpipebal.timeline import Timeline

    known: dict[str, type[Profile | Plan | Timeline]] = {
        "profile": Profile,
        "plan": Plan,
        "timeline": Timeline,
    }
    record = read_any(path)
    # A timeline is a Chrome trace, with the exact record under a key of its own.
    inner = record.get("gpipebal", record)
    found = inner.get("format", "") if isinstance(inner, dict) else ""
    name = found.removeprefix("gpipebal-") if isinstance(found, str) else ""
    wanted = kinds or tuple(known)
    if name not in wanted:
        raise FileFormatError(
            f"file is no {_either(wanted)}: file={str(path)!r}"
            + (f" (it is a {name})" if name in known else "")
            + f".\nFix: name a file that {' or '.join(_MAKERS[kind] for kind in wanted)} wrote."
        )
    return known[name].load(path)


#: Which commands write what.
_MAKERS = {
    "profile": "gpipebal profile",
    "plan": "gpipebal solve",
    "timeline": "gpipebal simulate",
}


def _either(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


#: Types of pictures that are always there.
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | None) -> None:
    """Refuse a picture that cannot be written, before any work is done for it.

    Raises:
        UsageError: the suffix is none of a picture, or there is no such folder.
    """
    check_output(path, "--plot")
    if path is not None and not path.lower().endswith(_SUFFIXES):
        raise UsageError(
            f"picture has a type that cannot be written: --plot {path} (expected a name that ends "
            f"in {_either(_SUFFIXES)}).\nFix: --plot {path}.png."
        )


def save_plot(drawn: Any, path: str) -> None:
    """Write axes or a whole figure to a file.

    Args:
        drawn: What a function of `gpipebal.plots` returned.
        path: File to write.
    """
    from gpipebal.plots import save_figure

    figure: Figure = drawn.figure if hasattr(drawn, "figure") and drawn.figure else drawn
    save_figure(figure, path)
