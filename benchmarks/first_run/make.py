"""Make the figures of the README: its example's plan, and two runs of the command.

    python benchmarks/first_run/make.py             # some minutes, on a quiet machine
    python benchmarks/first_run/make.py --readme    # only the tables, from what is stored

Writes plan.json (the plan of the README's example), report-except_last.json and
report-never.json (the command's own reports), plan.png (the picture of the first), the table in
README.md, and the table in benchmarks/first_run/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpipebal.files import atomic_path
from gpipebal.plan import Plan
from gpipebal.units import format_bytes, format_percent, format_seconds

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODES = ("except_last", "never")


def main() -> None:
    """Run everything, and write the tables into the two README files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    if not parser.parse_args().readme:
        make_example_plan()
        for mode in MODES:
            make_run(mode)
    write_tables()


def make_example_plan() -> None:
    """Run the README's first example, and keep its plan."""
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(compile(example.group(1), "README.md", "exec"), names)
    names["plan"].save(HERE / "plan.json")


def make_run(mode: str) -> None:
    """Run the command in a process of its own, and keep its report and its picture."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpipebal", "run", "resnet101", "--partitions", "2"]
        subprocess.run([*command, "--checkpoint", mode, "--output", folder], check=True)
        report = json.loads((Path(folder) / "report.json").read_text())
        del report["output"]
        with atomic_path(HERE / f"report-{mode}.json") as path:
            path.write_text(json.dumps(report, indent=1) + "\n")
        if mode == MODES[0]:
            shutil.copyfile(Path(folder) / "plan.png", HERE / "plan.png")


def write_tables() -> None:
    """Put the stored results into the README files."""
    table = f"```\n{Plan.load(HERE / 'plan.json')}\n```"
    replace_block(ROOT / "README.md", "<!-- table: benchmarks/first_run/plan.json -->", table)
    replace_block(HERE / "README.md", "<!-- result -->", "```\n" + result_table() + "\n```")


def replace_block(path: Path, mark: str, block: str) -> None:
    """Replace the fenced block behind a mark."""
    text = path.read_text()
    pattern = re.escape(mark) + r"\n```.*?\n```"
    found, n_found = re.subn(pattern, lambda _: f"{mark}\n{block}", text, flags=re.DOTALL)
    assert n_found == 1, f"{mark} stands {n_found} times in {path}"
    with atomic_path(path) as temporary:
        temporary.write_text(found)


def result_table() -> str:
    """Write predicted and measured figures of the runs, and the ratios to the plain model."""
    lines = [
        f"{'checkpoint':<12} {'step, predicted':>15} {'measured':>9} {'off by':>8} "
        f"{'peak memory, predicted':>23} {'measured':>9} "
        f"{'vs plain, 1 thread':>19} {'vs plain, all cores':>20}"
    ]
    for mode in MODES:
        report = json.loads((HERE / f"report-{mode}.json").read_text())
        one, every = report["speedups"].values()
        lines.append(
            f"{mode:<12} {format_seconds(report['predicted_step_time']):>15} "
            f"{format_seconds(report['step_time']):>9} "
            f"{format_percent(report['step_time_error']):>8} "
            f"{format_bytes(sum(report['predicted_peak_bytes'])):>23} "
            f"{format_bytes(sum(report['peak_bytes'])):>9} "
            f"{one:>18.2f}x {every:>19.2f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
