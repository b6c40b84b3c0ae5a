"""How an attack tells how far it is. Attacks report; whoever runs them decides whether anybody watches."""

from collections.abc import Callable

# (stage in words, steps done, steps in all as far as known)
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """The progress of an attack that nobody watches."""
