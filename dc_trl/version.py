"""Version of the package, importable without its dependencies."""

__version__ = "0.2.0"
