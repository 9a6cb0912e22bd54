"""Many runs: grids of settings, several runs in one stack of models."""
