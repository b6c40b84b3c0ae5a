"""What one run of the campaign ends with, and what every part offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

# Faults: what must never happen. The campaign's promise is that each of these counts is zero.
FALSELY_RECOVERED = "falsely_recovered"
FALSE_TEXT = "false_certain_text"
FALSE_COUNT = "false_count"
FALSE_TOKEN = "false_certain_token"
UNCOVERED_CLASS = "uncovered_class"
FALSE_LAYER = "false_layer"
CRASH = "crash"
TOO_SLOW = "too_slow"
LOST_FINDING = "lost_finding"
HELD_GATE = "held_gate"  # over a leak: the search is said to have looked at everything, and another reader finds more
FAULTS = (
    *(FALSELY_RECOVERED, FALSE_TEXT, FALSE_COUNT, FALSE_TOKEN, UNCOVERED_CLASS, FALSE_LAYER),
    *(CRASH, TOO_SLOW, LOST_FINDING, HELD_GATE),
)


@dataclass(frozen=True)
class Fault:
    """Something that must not happen: its kind, and a sentence. `where` tells crashes of one kind apart."""

    kind: str
    sentence: str
    where: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its status or 'refused', its faults, and how many of the true texts are certain.

    `group` is the kind of batch, evidence or oracle, for tables of recall and for telling faults apart. `plain` says
    that nothing stood in the way (no defence, nothing left out), so that recall should be near 1.
    """

    status: str
    group: str = ""
    faults: tuple[Fault, ...] = ()
    num_texts: int = 0
    num_certain: int = 0
    plain: bool = False
    refusal: str = ""


class ShortRepr:
    """A repr that Python reads back and that leaves defaults out."""

    def __repr__(self) -> str:
        """The call that makes this object."""
        given = []
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if value != default:
                given.append(f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Part:
    """A part of the campaign: a seed draws a recipe, a recipe is run, and simpler recipes are tried where it fails.

    `reproduce` writes a recipe as a few lines of Python. `chunk` seeds are run one after the other in one process, as
    they share models.
    """

    name: str
    draw: Callable[[int], Any]
    run: Callable[[Any], Outcome]
    simpler: Callable[[Any], Iterator[Any]]
    reproduce: Callable[[Any], str]
    chunk: int = 16
    limit_seconds: float = 120.0
    settings: Mapping[str, Any] = field(default_factory=dict)


def python(*lines: str) -> str:
    """Lines of Python that find the campaign."""
    return "\n".join(("import sys; sys.path.insert(0, 'benchmarks')", *lines))


def attack_again(recipe: Any, faults: str, *imports: str) -> str:
    """Lines of Python that make a recipe's evidence, read it and judge what was read."""
    return python(
        *("import unmask", *imports, f"recipe = {recipe!r}", "model, evidence = observe(recipe)"),
        "recovery = unmask.recover_text(evidence, model)",
        f"print(recovery, *{faults}, sep='\\n')",
    )
