"""What a person can get wrong, as one sentence that says what happened and what to do."""


class UserError(Exception):
    """Bad arguments or bad input. Shown as it is: in the page, or on stderr with exit status 2."""


class Cancelled(Exception):  # noqa: N818 (not an error)
    """Raised inside the engine when its caller asked it to stop."""


def first_line(error: Exception, longest: int = 300) -> str:
    """What a library's error says, as far as it fits into a sentence of ours; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]
