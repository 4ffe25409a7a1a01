"""Every error a user can meet, as one small tree.

``PacelineError`` is the root. A message says what was given, what is allowed and what to do.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of all errors raised on purpose by Paceline."""


class ConfigError(PacelineError, ValueError):
    """An engine option, flag or combination of them cannot work."""


class CheckpointError(PacelineError, ValueError):
    """A checkpoint folder cannot be served: unsupported, incomplete or inconsistent."""


class RequestError(PacelineError, ValueError):
    """One request is refused; no other request is affected.

    Attributes:
        param: name of the offending request field, or None.
        code: short machine-readable reason in the OpenAI style, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested output, exceeds the maximum context length."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RequestFailedError(PacelineError, RuntimeError):
    """One request failed inside the engine, through no fault of its sender; no other request is affected."""


class EngineDeadError(PacelineError, RuntimeError):
    """The engine stopped; requests in flight were lost and new ones are refused until it is back."""


class InvariantError(PacelineError, AssertionError):
    """An internal invariant does not hold: a defect of Paceline, never of the user's input."""


def shown(value: object) -> str:
    """A refused value for an error message, short whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # of an int past 4,300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
