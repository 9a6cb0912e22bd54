"""Every table and figure of the five papers as a recipe: the paper's setting, the published numbers
as data, and what we read into silences.

loader.py     a TOML file -> a checked Recipe (recipe.py); neither imports torch
plan.py        a recipe at a scale -> the runs it takes; cells that need the same run share it
estimate.py    how long and how large these runs will be, without running them
measures.py    what a cell of a table shows, read from a run
claims.py      does the paper's claim hold in these numbers
tables.py      the paper's table with published, ours and difference
figure_data.py    the data of a figure
results_pages.py       docs/results, from the folders that `remanence reproduce` left
"""

from __future__ import annotations

from remanence.recipes.loader import list_recipes, load_recipe
from remanence.recipes.recipe import SCALES, Recipe

__all__ = ["SCALES", "Recipe", "list_recipes", "load_recipe"]
