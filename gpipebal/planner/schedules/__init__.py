"""Splits for schedules whose makespan has no closed form.

Read in this order: `search` (the search, by simulation), `ways` (which splits are allowed, and in
which modes), `costs` (what partitions cost under a schedule), `lower_bound` (what no split can be
below).
"""
