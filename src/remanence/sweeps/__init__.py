"""Several runs: methods x settings x seeds.

`axes` expands a grid, `grid` plans and runs a comparison, `scheduler` runs its runs in turn or in
stacks. Runs in one stack share an engine: `compatibility` finds those that can, `run_batcher` runs
them in threads, and `shared_engine` computes their requests as one. May import `rounds` and
everything below it.
"""
