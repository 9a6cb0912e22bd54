"""Engines train and evaluate clients where their data are. No engine knows which method it runs.

Read first `core/engine.py` (the protocol), `sequential.py` (the reference for all others) and
`table.py` (all engines by name). `docs/engines.md` explains the decisions.

All engines: `base` (defaults of the protocol), `client_plan` (contexts, keys, batches, replies),
`evaluation` (groups and counters), `packing` (trees for another process), `memory`, `autotune` and
`cost` (engine "auto").

`vectorized`: `vectorized` (how a stack trains), `stack_eval` (how it is evaluated), `run_slices`
(what it consists of), `vector_steps` (its steps), `captured_steps` (captured steps), `stack_checks`
(what cannot be stacked), `frozen_prefix` (layers computed once), `compiled_eval`.

`processes`: `processes`, `worker_pool` (processes that may die or hang), `process_worker` (what one
does), `sequential_fast` and `traced_step` (how it trains one client).

`ray`: the engine over a Ray cluster. Engine `flower` is in `remanence.flower`, which passes it in.

May import `training`, `methods`, the parts of methods, `config`, `data`, `models`, `kernels` and
`core`.
"""
