"""Bytes and operations of a layer.

Read in this order: `storages` (what it saves, hands on and needs), `buffers` (which buffers a
recompute has copies of), `flops` (its operations).
"""
