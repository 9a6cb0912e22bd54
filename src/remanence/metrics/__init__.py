"""Measures: pure functions of the results of a run.

A run records counts (correct, total and predicted examples by class, model and moment of a round);
everything else is computed from them later.

- `accuracy_tables`: accuracies from the counts of the ledger; the other modules start from these.
- `forgetting`, `confusion`, `phase_decomposition`, `examples`: what was forgotten, which classes it
  is confused with, in which phase of a round, and which examples.
- `clients`, `drift` and `drift_as_printed` (from `drift_curves`), `peer_usage`, `convergence`:
  differences between clients, accuracy under drift, selection of peers, and speed.
- `groups`, `cached`, `summary_rows`, `group_stats`, `robustness`, `seed_noise`: the runs of a
  method together, as the report and the diagnosis use them.

The package imports `results`, `core` and the table of robust aggregators, and draws nothing. Begin
with `accuracy_tables`, then `forgetting`.
"""
