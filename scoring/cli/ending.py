"""How a run of the command ends: exit codes, and the error of what its user can mend."""

FINE = 0
SOME_FAILED = 1  # the output is there; some of its reads have errors in place of scores
WRONG_INPUT = 2  # an argument, a file or all of its rows are wrong (argparse ends so too)
SERVICE_FAILED = 3  # the service cannot be reached, refuses, or has changed: what is finished is kept
INTERRUPTED, TERMINATED = 130, 143  # as shells say it: 128 and the signal's number


class WrongInput(Exception):
    """What the command was given cannot be used; the message says what is wrong with it."""
