"""Settings: how a step is run, and which balances are tried in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import gpipebal as gb
from gpipebal.planner import equal_split
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode

N_PARTITIONS = 2
#: Numbers of micro-batches that are tried.
CHUNKS = (1, 4, 8)
#: Balances that are tried in each setting.
N_BALANCES = 5
#: Where to cut besides the planner's choice and the equal split: so much of a micro-batch's time
#: in the first partition.
SHARES = (0.25, 0.75, 0.4, 0.6, 0.15, 0.85, 0.33, 0.67)


@dataclass(frozen=True)
class Setting:
    """How a training step is run.

    Attributes:
        way: ``'loss(pipe(x))'``, ``'step gpipe'`` or ``'step 1f1b'``.
        chunks: Micro-batches of a mini-batch.
        checkpoint: Which of them are recomputed.
    """

    way: str
    chunks: int
    checkpoint: CheckpointMode

    @property
    def schedule(self) -> str:
        """Name of its schedule."""
        return "1f1b" if self.way == "step 1f1b" else "gpipe"

    @property
    def loss_inside(self) -> bool:
        """Whether the last partition computes the loss."""
        return self.way != "loss(pipe(x))"


#: The first way in every number of micro-batches and mode (with one micro-batch `except_last` is
#: `never`); the others in some.
SETTINGS = (
    Setting("loss(pipe(x))", 1, "never"),
    Setting("loss(pipe(x))", 1, "always"),
    *(
        Setting("loss(pipe(x))", chunks, checkpoint)
        for chunks in CHUNKS[1:]
        for checkpoint in ("never", "except_last", "always")
    ),
    Setting("step gpipe", 8, "never"),
    Setting("step 1f1b", 8, "except_last"),
)
#: Each way once, to try the script: all with one number of micro-batches, for one profile.
QUICK_SETTINGS = (
    Setting("loss(pipe(x))", 4, "except_last"),
    Setting("step gpipe", 4, "never"),
    Setting("step 1f1b", 4, "except_last"),
)


def choose_balances(profile: Profile, setting: Setting) -> dict[tuple[int, ...], str]:
    """Choose balances: the planner's, the equal split, and others over the whole range.

    Args:
        profile: Costs at the setting's number of micro-batches.
        setting: What they are for.

    Returns:
        Five balances, or as many as there are, and where each comes from.
    """
    solved = gb.solve(profile, N_PARTITIONS, chunks=setting.chunks, checkpoint=setting.checkpoint)
    found = {tuple(solved.balance): "planner"}
    for end, source in _cuts(profile):
        if 0 < end < profile.n_layers and len(found) < N_BALANCES:
            found.setdefault((end, profile.n_layers - end), source)
    return found


def _cuts(profile: Profile) -> Iterator[tuple[int, str]]:
    yield equal_split(profile.n_layers, N_PARTITIONS)[1], "equal split"
    until = list(accumulate(layer.time for layer in profile.layers))
    for share in SHARES:
        nearest = min(range(len(until)), key=lambda k: abs(until[k] - share * until[-1]))
        yield nearest + 1, f"{share:.0%} of the time"
    # Where one layer takes most of the time, several shares end at it.
    for k in range(1, 2 * N_BALANCES):
        share = k / (2 * N_BALANCES)
        yield round(share * profile.n_layers), f"{share:.0%} of the layers"
