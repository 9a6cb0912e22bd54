"""Transports for the round loop: `sequential` (the oracle), `vectorized`, `processes`; none knows which
method it carries.
"""
