"""The one exception a user is meant to read: it says which rule was broken, by which value, and what to do."""

from __future__ import annotations


class DriftlabError(ValueError):
    """Bad input or a broken file, described so that the reader can act on it.

    The command line prints the message alone; in Python it is an ordinary ValueError.
    """


class BackendWarning(UserWarning):
    """Kernels were asked for, or would have been taken, and plain torch runs instead. The numbers are the same."""
