"""Transports for the round loop: `loop` (the oracle), `stacked`, `processes`; none knows which
method it carries.
"""
