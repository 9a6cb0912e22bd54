"""`python -m gpu`; see suite.py."""

import sys

from gpu.suite import main

if __name__ == "__main__":
    sys.exit(main())
