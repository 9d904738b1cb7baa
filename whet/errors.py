"""The errors whet raises on purpose. The command line prints their one sentence and leaves with code 2."""


class WhetError(Exception):
    """Something the user can mend: a wrong key, a missing file, a full disk. One clear sentence."""


class Starved(WhetError):
    """A curriculum cannot fill a batch, and its starvation policy says so instead of waiting for ever."""


class Collapsed(WhetError):
    """Evaluations fell far below what they were. All of it is saved, the best weights too."""


class Stopped(KeyboardInterrupt):
    """A signal came while there was nothing to save. Its number decides the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Diverged(WhetError):
    """Three steps in a row were not finite. The last good checkpoint is untouched."""
