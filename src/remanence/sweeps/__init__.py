"""Several runs: methods x settings x seeds.

`axes` expands a grid, and `grid` plans and runs a comparison. `search` extends a comparison until
the best value of a setting is found, and `search_result` reads it. `scheduler` runs runs in turn or
in stacks. Runs in one stack share an engine: `compatibility` finds those that can, `run_batcher`
runs them in threads, and `shared_engine` computes their requests as one. May import `rounds` and
everything below it.
"""
