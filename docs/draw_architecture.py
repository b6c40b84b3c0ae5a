"""Draws docs/architecture.svg from the imports of src/unmask: python docs/draw_architecture.py

A layer's box has the first sentence of its docstring, and the rooms inside it. Only sources are read, by the standard
library. The order of the layers and the two sides of the fence are those of tests/test_house_rules.py, which enforces
them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "unmask"
RULES = ROOT / "tests" / "test_house_rules.py"
PICTURE = ROOT / "docs" / "architecture.svg"

WORDS = "words"  # the box of the small files that come first
WORDS_SUMMARY = "What every layer speaks of: settings, recoveries, channels, metrics"


# ---- what the code says


@dataclass(frozen=True)
class Box:
    """A layer of the package: its summary, its rooms (each with the rooms inside it), and its files.

    `is_ordered`: its rooms are layers themselves, each importing only from those before it.
    """

    name: str
    summary: str
    rooms: Mapping[str, tuple[str, ...]]
    files: tuple[Path, ...]
    is_ordered: bool = False


def read_strings(name: str, path: Path = RULES) -> tuple[str, ...]:
    """All texts of an assignment at the top of a file, in their order."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            texts = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            return tuple(str(part.value) for part in sorted(texts, key=lambda part: (part.lineno, part.col_offset)))
    raise ValueError(f"{path} has no {name}")


def read_boxes(layers: tuple[str, ...]) -> list[Box]:
    """One box a layer, those of one package together; the files that come before all packages share one."""
    names = list(dict.fromkeys(layer.split(".")[0] for layer in layers))
    num_words = next(place for place, name in enumerate(names) if (PACKAGE / name).is_dir())
    words = names[:num_words]
    files = tuple(PACKAGE / f"{name}.py" for name in words)
    first = Box(WORDS, WORDS_SUMMARY, dict.fromkeys(words, ()), files, is_ordered=True)
    return [first, *(_read_box(name, layers) for name in names[num_words:])]


def _read_box(name: str, layers: tuple[str, ...]) -> Box:
    folder = PACKAGE / name
    if not folder.is_dir():
        path = folder.with_suffix(".py")
        return Box(name, _summary(path), {}, (path,))
    ordered = [layer.removeprefix(f"{name}.") for layer in layers if layer.startswith(f"{name}.")]
    rooms = ordered or [path.name for path in _folders(folder)]
    inside = {room: tuple(path.name for path in _folders(folder / room)) for room in rooms}
    return Box(name, _summary(folder / "__init__.py"), inside, tuple(sorted(folder.rglob("*.py"))), bool(ordered))


def _folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/__init__.py"))


def _summary(path: Path) -> str:
    """The first sentence of a file's docstring, without the name of what it is about."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = text.split(". ")[0].rstrip(".").replace("`", "")
    about, _, rest = sentence.partition(": ")
    is_name = about.lower() in (path.parent.name, f"{path.parent.name}s")
    return f"{rest[0].upper()}{rest[1:]}" if rest and is_name else sentence


def count_imports(boxes: list[Box]) -> Counter[tuple[str, str]]:
    """How many imports of one box name a module of another one."""
    home = {path.stem: box.name for box in boxes for path in box.files if path.parent == PACKAGE}
    home |= {box.name: box.name for box in boxes}
    counts: Counter[tuple[str, str]] = Counter()
    for box in boxes:
        for path in box.files:
            for module in _imported(path):
                other = home.get(module.split(".")[1])
                if other and other != box.name:
                    counts[box.name, other] += 1
    return counts


def _imported(path: Path) -> Iterator[str]:
    """Modules of unmask that a file imports; the house has no relative imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module="unmask", names=names):
                modules = [f"unmask.{alias.name}" for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                continue
        yield from (module for module in modules if module.startswith("unmask."))


# ---- the drawing

WIDTH, MARGIN, TOP = 900, 20, 92
BOX_WIDTH, GAP, PADDING = 448, 9, 12
RAIL, STEP, CORNER = 500, 22, 7  # the first rail, the distance between two, and the radius of their corners
NAME_LINE, TEXT_LINE, INDENT = 20, 16, 78
TEXT_CHARACTERS, ROOM_CHARACTERS = 68, 60  # that fit into a box, in wide fonts too
SECOND_COLUMN = 11  # characters in front of it

STYLE = """
  svg { --paper: #ffffff; --ink: #1d2733; --soft: #5a6676; --line: #aab3c0; --box: #f4f6f8; --edge: #c6ccd5;
        --secret: #fdf0dc; --secret-edge: #d99b3c; --attack: #e4edfb; --attack-edge: #4a7fd0; --never: #c0392b; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #14181e; --ink: #e7ebf0; --soft: #a3aebc; --line: #56606d; --box: #1e242c; --edge: #3b444f;
          --secret: #35291a; --secret-edge: #c98f3d; --attack: #1a2940; --attack-edge: #6b9be6; --never: #ef6b5e; } }
  text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 12px; fill: var(--ink); }
  .title { font-size: 19px; font-weight: 650; } .soft { fill: var(--soft); }
  .name { font-size: 14px; font-weight: 650; } .room { fill: var(--soft); font-size: 11px; }
  .name, .room, .label { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
  .label { font-size: 11.5px; } .paper { fill: var(--paper); }
  .box { fill: var(--box); stroke: var(--edge); }
  .secret { fill: var(--secret); stroke: var(--secret-edge); }
  .attack { fill: var(--attack); stroke: var(--attack-edge); }
  .line { fill: none; stroke: var(--line); stroke-width: 1.3; }
  .dot { fill: var(--ink); }
  .never { stroke: var(--never); stroke-width: 2; stroke-linecap: round; fill: none; }
"""


@dataclass(frozen=True)
class Row:
    """A box with its place: `top` and `height` of the box, `y` of its line, `x` of its rail."""

    box: Box
    lines: tuple[str, ...]
    rooms: tuple[tuple[str, str], ...]  # lines, each in two columns
    top: float
    number: int

    @property
    def height(self) -> float:
        """As high as its text."""
        return 2 * PADDING + NAME_LINE - 8 + TEXT_LINE * (len(self.lines) + len(self.rooms)) + (2 if self.rooms else 0)

    @property
    def y(self) -> float:
        """Where its line leaves the box: at its name."""
        return self.top + PADDING + 7

    @property
    def x(self) -> float:
        """Where its rail goes down."""
        return RAIL + STEP * self.number


def place_rows(boxes: list[Box]) -> list[Row]:
    """Boxes from top to bottom."""
    rows: list[Row] = []
    for number, box in enumerate(boxes):
        top = rows[-1].top + rows[-1].height + GAP if rows else TOP
        rows.append(Row(box, tuple(_balance(box.summary)), tuple(_room_lines(box)), top, number))
    return rows


def _balance(text: str) -> list[str]:
    """As few lines as fit, all about equally long."""
    num_lines = len(wrap(text, TEXT_CHARACTERS))
    return next(lines for width in range(20, TEXT_CHARACTERS + 1) if len(lines := wrap(text, width)) == num_lines)


def _room_lines(box: Box) -> Iterator[tuple[str, str]]:
    """Rooms side by side; where they have rooms themselves, a line or more each, those inside in a second column."""
    if any(box.rooms.values()):
        for room, inside in box.rooms.items():
            lines = wrap("  ".join(inside), ROOM_CHARACTERS - SECOND_COLUMN) or [""]
            yield from ((room if line is lines[0] else "\xa0", line) for line in lines)
    else:
        sign = " → " if box.is_ordered else "  "
        text = sign.join(room.replace(" ", "\xa0") for room in box.rooms)
        yield from ((line, "") for line in wrap(text, ROOM_CHARACTERS))


def draw() -> str:
    """The picture as SVG."""
    boxes = read_boxes(read_strings("LAYERS"))
    rows, counts = place_rows(boxes), count_imports(boxes)
    secret = frozenset(read_strings("SECRETS_SIDE"))
    height = rows[-1].top + rows[-1].height + MARGIN
    parts = [
        f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="12"/>',
        f'<text class="title" x="{MARGIN}" y="42">Each layer imports only from layers above it</text>',
        f'<text class="soft" x="{MARGIN}" y="64">src/unmask from top to bottom. A line leaves each layer, turns, and '
        "goes down; a dot is where a later layer imports it.</text>",
        *(_draw_rail(row, rows, counts) for row in rows),
        *(_draw_box(row, secret) for row in rows),
        *(mark for row in rows for mark in _draw_imports(row, rows, counts, secret)),
        *_draw_legend(),
    ]
    label = "The layers of unmask from top to bottom, and which layer imports which: each only from layers above it."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _draw_rail(row: Row, rows: list[Row], counts: Counter[tuple[str, str]]) -> str:
    """The line of a layer: to the right, a corner, and down to the last layer that imports it."""
    users = [other.y for other in rows if counts[other.box.name, row.box.name]]
    corner = f"H{row.x - CORNER:g}q{CORNER} 0 {CORNER} {CORNER}V{max(users):g}" if users else f"H{row.x:g}"
    name = f'<text class="label" x="{row.x + 9:g}" y="{row.y + 4:g}">{row.box.name}</text>'
    return f'<path class="line" d="M{MARGIN + BOX_WIDTH} {row.y:g}{corner}"/>{name}'


def _draw_box(row: Row, secret: frozenset[str]) -> str:
    """A layer with its summary and its rooms."""
    side = "secret" if row.box.name in secret else "attack" if row.box.name == "attacks" else "box"
    x, y = MARGIN + PADDING, row.y + 4.5
    texts = [f'<text class="name" x="{x}" y="{y:g}">{row.box.name}</text>']
    for number, line in enumerate(row.lines):
        texts.append(f'<text x="{x}" y="{y + NAME_LINE + TEXT_LINE * number:g}">{escape(line)}</text>')
    start = y + NAME_LINE + TEXT_LINE * len(row.lines) + 2
    for number, columns in enumerate(row.rooms):
        for column, text in enumerate(filter(None, columns)):
            place = f'x="{x + INDENT * column}" y="{start + TEXT_LINE * number:g}"'
            texts.append(f'<text class="room" xml:space="preserve" {place}>{escape(text)}</text>')
    shape = f'x="{MARGIN}" y="{row.top:g}" width="{BOX_WIDTH}" height="{row.height:g}" rx="8"'
    return f'<rect class="{side}" {shape}/>' + "".join(texts)


def _draw_imports(row: Row, rows: list[Row], counts: Counter[tuple[str, str]], secret: frozenset[str]) -> Iterator[str]:
    """A dot on the rail of each layer that is imported; where the fence stands, a cross."""
    for other in rows:
        count, is_fenced = counts[row.box.name, other.box.name], row.box.name == "attacks" and other.box.name in secret
        if other.number > row.number and count:
            raise ValueError(f"{row.box.name} imports {other.box.name}, which comes after it")
        if is_fenced and other.number < row.number:
            if count:
                raise ValueError(f"{row.box.name} imports {other.box.name}, which is behind the fence")
            yield _cross(other.x, row.y)
        elif count:
            yield f'<circle class="dot" cx="{other.x:g}" cy="{row.y:g}" r="{_radius(count):g}"/>'


def _radius(count: int) -> float:
    """Three sizes only, so that few changes of the code change the picture."""
    return 2.5 if count < 4 else 3.8 if count < 20 else 5.2


def _cross(x: float, y: float) -> str:
    return f'<path class="never" d="M{x - 3.5:g} {y - 3.5:g}l7 7m0 -7l-7 7"/>'


def _draw_legend() -> Iterator[str]:
    """What the signs mean, in the corner that the rule keeps empty."""
    x, y = 690, TOP + 18
    signs = (
        ('<circle class="dot" cx="{x}" cy="{y}" r="4"/>', "imports; a larger dot: more"),
        ('<rect class="attack" x="{x0}" y="{y0}" width="14" height="12" rx="3"/>', "the adversary's side"),
        ('<rect class="secret" x="{x0}" y="{y0}" width="14" height="12" rx="3"/>', "the secret's side"),
        ("cross", "the fence: never imported"),
    )
    for number, (sign, words) in enumerate(signs):
        middle = y + 21 * number
        yield _cross(x, middle) if sign == "cross" else sign.format(x=x, y=middle, x0=x - 7, y0=middle - 6)
        yield f'<text class="soft" x="{x + 15}" y="{middle + 4}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
