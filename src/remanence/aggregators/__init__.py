"""How a server aggregates replies: the mean, and robust aggregators.

    mean               the weighted mean, the default; `training/server_step.py` completes it
    robust             `ROBUST`, the table of robust aggregators
    median             coordinate-wise median, trimmed mean
    krum               Krum, Multi-Krum
    geometric_median   the geometric median
    norm_clip          clipped updates, then their mean
    minimum_replies    the least number of replies that a robust aggregator needs
    coordinatewise     reductions over the coordinates of many models

This package imports core alone.
"""
