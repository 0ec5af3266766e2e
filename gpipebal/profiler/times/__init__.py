"""Clocked rounds over all layers.

Read in this order: `rounds` (the work that is clocked), `cores` (whether it had a core to itself),
`settle` (layers compared with the whole chain), `progress` (a bar that shows how far it is).
"""
