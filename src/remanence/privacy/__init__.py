"""Differential privacy: parts that add noise at a client or at the server, and the accountant that says what they promise."""
