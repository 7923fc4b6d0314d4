"""The version of every package of the tree; their wheels read it from here."""

__version__ = "0.1.0"
