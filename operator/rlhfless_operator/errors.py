"""Errors that the user can fix. The command line shows only their message."""


class UserError(Exception):
    """An error whose message says what is wrong and what to do about it."""


class StoreUnavailableError(UserError):
    """The artifact store does not answer. The job resumes once it does."""
