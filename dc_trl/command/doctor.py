from ..doctor.command import __doc__, main, make_parser


__all__ = ["__doc__", "main", "make_parser"]
