"""Profile: what every layer of a chain costs, for one micro-batch, and how that was found out.

A profile is all that the planner knows about a model. It holds times in seconds and sizes in bytes,
and keeps what a layer saves for its backward as a *set of storages*: two neighbours that save the
same tensor (the output of one is the input of the other) hold it once, so the memory of a
partition is the union of the sets of its layers and never their sum.

Read in this order: `layer` (one layer, a skip connection, tied parameters, the terms of a step),
`profile` (the noun), `given` (what it is made of if costs are given), `gradients` (the memory of
gradients on their way back), `checks` (what makes no sense in a profile is refused), `record`
(the profile as JSON values), `sizes`, `moments` and `fit` (the costs at other numbers of rows),
`fingerprint`, `match` and `ties` (whether it still fits a model).
"""

from gpipebal.profile.layer import (
    AloneShares,
    LayerProfile,
    SkipProfile,
    StepTerms,
    TieProfile,
    TurnTimes,
)
from gpipebal.profile.match import ProfileMatch, match_profile
from gpipebal.profile.profile import LayerTimes, Profile

__all__ = [
    "AloneShares",
    "LayerProfile",
    "LayerTimes",
    "Profile",
    "ProfileMatch",
    "SkipProfile",
    "StepTerms",
    "TieProfile",
    "TurnTimes",
    "match_profile",
]
