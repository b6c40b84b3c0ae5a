"""Callers' mistakes. Each message says what was seen, what was expected and what to do next.

Nature's refusals are not here: an attack that cannot succeed returns a `Status`, it does not raise.
"""


class UnmaskError(Exception):
    """Base of every error that is the caller's to fix; the command line shows it without a traceback."""


class UnknownModelError(UnmaskError):
    """A name that is neither in the catalogue, nor a folder, nor reachable by transformers."""


class UnsupportedModelError(UnmaskError):
    """A model whose family has no adapter."""


class EvidenceError(UnmaskError):
    """Evidence that cannot be used: foreign, truncated, not finite, wrongly shaped or of another model."""


class TooSmallError(EvidenceError):
    """An update so near zero that computing with it loses it: a defence left nothing, or a factor must be undone."""


class InputError(UnmaskError):
    """An argument that is out of range or of the wrong kind."""


class TooLargeError(InputError):
    """Texts that certainly do not fit into the memory that is free."""

    def __init__(self, message: str, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


class ServiceError(UnmaskError):
    """A service that did not answer as it should. What it answered before is kept."""


class NoAnswerError(ServiceError):
    """A service that answers nobody here: not reached, too busy, or without a key that it knows."""
