"""Results as Python and notebooks use them: numbers, data frames, pictures, reports.

- `results`: `RunResult` and `ComparisonResult`, which `rem.run`, `rem.compare` and `rem.load`
  return; `open_results` accepts results and folders.
- `actions`: `rem.diagnose`, `rem.evaluate`, `rem.export` and `rem.report`, which the commands call.
- `frames`: metrics as a pandas.DataFrame; `plots`: curves with matplotlib; `html`: what a notebook
  shows.

The numbers come from `metrics`, tables and phrases from `reports`. Begin with `results`.
"""
