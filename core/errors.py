"""What a person can get wrong, as one sentence that says what happened and what to do."""


class UserError(Exception):
    """Bad arguments or bad input. Shown as it is: in the page, or on stderr with exit status 2."""


class Cancelled(Exception):  # noqa: N818 (not an error)
    """Raised inside the engine when its caller asked it to stop."""
