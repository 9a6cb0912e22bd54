"""Counts first, measures later: the ledger, and pure functions of it."""
