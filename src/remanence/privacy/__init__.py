"""Differential privacy of clients (`client_dp`), examples (`dp_sgd`) and label counts (`label_dp`).

Each part declares its noise as a `Mechanism`; `accountant` holds the formulas, and
`rounds.privacy_budget` composes a run's guarantees from the declarations. This package imports core
and sibling modules alone.
"""
