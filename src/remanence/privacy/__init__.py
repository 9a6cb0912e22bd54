"""Differential privacy of clients (`client_dp`), examples (`dp_sgd`) and label counts (`label_dp`).

Each part declares its noise as a `Mechanism`. `accountant` holds the formulas, `guarantees` what a
run promises a client or an example, and `rounds.privacy_budget` makes these promises from the
declarations. This package imports core and sibling modules alone.
"""
