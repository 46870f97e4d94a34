"""Faults that are the user's to mend: their message is all that the command line shows of them."""


class UserError(Exception):
    """One sentence that names what is wrong and the remedy."""


class StoreUnavailableError(UserError):
    """The artifact store does not answer; the job goes on from where it was once it does."""
