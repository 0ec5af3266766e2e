"""Clocked rounds over all layers.

Read in this order: `rounds` (the work that is clocked), `settle` (layers compared with the whole
chain), `progress` (a bar that shows how far it is).
"""
