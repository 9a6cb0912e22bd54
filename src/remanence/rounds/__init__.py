"""The round loop: with a server, without one, with several models; evaluation and records."""
