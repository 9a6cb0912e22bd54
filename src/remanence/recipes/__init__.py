"""Recipes: every table and figure of the five papers, as TOML files with the paper's experiments,
the published numbers, its claims, and our interpretation where the paper leaves something open.

- `recipe`, `loader`: the dataclasses of a recipe, and how a TOML file becomes one.
- `plan`: the runs that a recipe needs at a scale. `estimate`: their time and memory.
- `reproduce`: runs a plan and writes the result. `run_folder`: the folder it writes to.
- `measures`, `drift_measures`, `cell_evidence`, `evaluate_cells`: the numbers of the cells of a
  table, from the runs.
- `claims`, `verdicts`: the claims of the paper as comparisons of these numbers, and what they say.
- `tables`, `figure_data`, `figure_plots`: tables and figures in the paper's layout.
- `outcomes`, `claim_tables`, `results_pages`: stored results, and the pages in docs/results.

The package may import everything except the front ends; `recipe` and `loader` import no torch.
Begin with `recipe`, then `plan` and `reproduce`.
"""

from __future__ import annotations

from remanence.recipes.loader import list_recipes, load_recipe
from remanence.recipes.recipe import SCALES, Recipe

__all__ = ["SCALES", "Recipe", "list_recipes", "load_recipe"]
