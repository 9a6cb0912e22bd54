"""A run's folder: the formats of its files, checkpoints among them, and readers that distrust them."""
