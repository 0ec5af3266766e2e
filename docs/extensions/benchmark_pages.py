"""A page for every benchmark: its README, which is itself made from the stored results.

The pages lie in ``generated/`` and are written anew by every build, so that a benchmark needs no
page of its own in the documentation.
"""

from __future__ import annotations

from pathlib import Path


def benchmarks(folder: Path) -> list[Path]:
    """List the folders of benchmarks, those that have a README."""
    return sorted(path.parent for path in folder.glob("*/README.md"))


def write_pages(folder: Path, out: Path) -> None:
    """Write one page for each benchmark, and remove those of benchmarks that are gone."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = {f"{path.name}.md": path / "README.md" for path in benchmarks(folder)}
    for page in out.glob("*.md"):
        if page.name not in wanted:
            page.unlink()
    for name, readme in wanted.items():
        text = f"```{{include}} ../../../benchmarks/{readme.parent.name}/README.md\n```\n"
        page = out / name
        # Only what changed: the time of a page decides whether it is read again.
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
