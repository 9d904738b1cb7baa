"""Errors that whet raises on purpose. The command line prints their sentence and exits with code 2."""


class WhetError(Exception):
    """A fault that the user can repair (a wrong key, a missing file, a full disk), in one clear sentence."""


class Starved(WhetError):
    """A curriculum cannot fill a batch, and its starvation policy is to stop rather than to wait for ever."""


class Collapsed(WhetError):
    """Evaluations fell far below their best. The run is saved, and so are its best weights."""


class Stopped(KeyboardInterrupt):
    """A signal arrived while there was nothing to save; its number sets the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Lost(WhetError):
    """No process holds the newest weights any more. The last checkpoint is untouched."""


class Diverged(WhetError):
    """Losses are not finite, or the engine has other weights than the learner; the last checkpoint is untouched."""
