"""`python -m remanence`: the same as the command `remanence`."""

from remanence.cli.main import main

main()
