"""Splits for schedules whose makespan has no closed form.

Read in this order: `search` (the search, by simulation), `costs` (what partitions cost under a
schedule), `bounds` (what no split can be below).
"""
