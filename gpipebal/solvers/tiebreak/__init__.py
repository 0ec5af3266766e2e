"""Which of the splits that are equally good: the most even one.

Read in this order: `choose` (which of the ways), `near_even` (where cuts can be at all) and `heavy`
(layers that spoil evenness in any split), `narrow` (a table over windows), `by_rows` (the same for
many places at once), `parametric` (by prices), `envelope` (the cheapest ends, for `narrow` and
`parametric`).
"""
