"""Measures: pure functions of the results of a run.

A run records counts (correct, total and predicted examples by class, model and moment of a round);
everything else is computed from them later.

- `accuracy_tables`: accuracies from the counts of the ledger; the other modules start from these.
- `forgetting`, `phase_decomposition`, `examples`: what was forgotten, in which phase of a round,
  and which examples.
- `clients`, `drift`, `peer_usage`, `convergence`: differences between clients, accuracy under
  drift, selection of peers, and speed.
- `groups`, `cached`, `summary_rows`, `group_stats`, `seed_noise`: the runs of a method together, as
  the report and the diagnosis use them.

The package imports `results` and `core` only, and draws nothing. Start with `accuracy_tables`, then
`forgetting`.
"""
