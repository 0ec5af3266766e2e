"""A trial as a pipeline: what layers take when partitions work side by side.

Read in this order: `trial` (the steps that are run), `traces` (what their timelines tell),
`sharing` (how partitions slow each other down), `findings` (all of it, for the profile), `correct`
(the profile corrected by it).
"""
