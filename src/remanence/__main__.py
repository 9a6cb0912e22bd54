"""`python -m remanence` is the command `remanence`."""

from remanence.cli.main import main

main()
