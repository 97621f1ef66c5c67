"""The two ways a command ends badly, and nothing else."""


class InputError(ValueError):
    """The user's input is wrong: exit code 2. One line that names what is wrong, where, and the fix."""


class PartFailedError(RuntimeError):
    """A part that we drive failed (an engine died, a stage's process ended): exit code 3. One line, then where the log is."""
