"""The errors and the warning that a user of the package can meet."""

import copyreg


class AutoshardError(ValueError):
    """Something that the caller can mend; the command line prints it as one line and exits with code 2."""

    def __reduce__(self):  # copied and sent as it is: not all of them are made from their text
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore[reportAttributeAccessIssue]


class ConfigError(AutoshardError):
    """A setting, an option or a combination of them that cannot be used."""


class DataError(AutoshardError):
    """Training data that is missing, empty or unreadable."""


class AutoshardWarning(UserWarning):
    """Something that works, but not as well as its author probably expects."""
