"""The errors whet raises on purpose. The command line prints their one sentence and leaves with code 2."""


class WhetError(Exception):
    """Something the user can mend: a wrong key, a missing file, a full disk. One clear sentence."""


class Starved(WhetError):
    """A curriculum cannot fill a batch, and its starvation policy says so instead of waiting for ever."""


class Collapsed(WhetError):
    """Evaluations fell far below what they were. All of it is saved, the best weights too."""


class Diverged(WhetError):
    """Three steps in a row were not finite. The last good checkpoint is untouched."""
