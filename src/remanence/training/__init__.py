"""One client's steps, the server's step, the gate between them, and the state of a run. Knows no transport."""
