"""The command `remanence`: parses flags, calls the Python API and prints the results.

`main` has the app and the entry point; `runs` the commands that train, `analysis` those that read
runs, `data`, `recipes` and `flower` those of the packages with these names. `flags` makes the flags
of an experiment from the settings in `remanence.config`; `options` has the options that several
commands share, `listing` the tables of `remanence list` and `remanence data show`, `summary` what
is printed at the end of a run.

Commands may import every package, but only inside functions: `remanence --help` does not import
torch. Begin with `main`, then `runs`.
"""
