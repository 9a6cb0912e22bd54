"""The version, in the one place that also works where the package is not installed."""

__version__ = "0.1.0"
