"""What everything else stands on: types, trees of tensors, random keys, errors, files, the pure model. Imports nothing else of the project."""
