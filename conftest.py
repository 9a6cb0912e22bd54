"""The one module of the package that cannot be imported without its extra has no doctests to
offer where that extra is not installed.
"""

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["src/remanence/kernels/triton_conv.py"]
