"""Damaged files of evidence: refused with a sentence, or read; an attack on what was read claims nothing false."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import unmask
from campaign import encoders, gradients, oracles, states, updates
from campaign.oracles import OracleRecipe
from campaign.outcome import CRASH, Fault, Outcome, Part, ShortRepr, python
from campaign.states import StatesRecipe
from campaign.updates import UpdateRecipe
from unmask.evidence import AttentionEvidence, GradientEvidence, HiddenEvidence
from unmask.models import Model

# Values that a header may hold after an accident or an attack.
ODD_VALUES = (
    None,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "x",
    [],
    {},
    True,
    "next_token",
    "float8",
    "bool",
)
SWAPS = (
    *((b'"F32"', b'"I32"'), (b'"F32"', b'"U32"'), (b'"F32"', b'"F16"'), (b'"BOOL"', b'"U8"'), (b'"F32"', b'"C64"')),
    *(
        (b"gradients", b"hidden"),
        (b'"gradients\\', b'"attention\\'),
        (b"data_offsets", b"data_offsetz"),
        (b"[0,", b"[9,"),
    ),
)
ORACLE = OracleRecipe("attention, 1 head", width=2)


@dataclass(frozen=True)
class Layer:
    """One attention layer whose output is seen."""

    seed: int = 0


@dataclass(frozen=True, repr=False)
class FileRecipe(ShortRepr):
    """What the file holds, and what happens to it: (how, where, value), where as a share of the part that is hit."""

    evidence: UpdateRecipe | StatesRecipe | Layer | OracleRecipe
    damage: tuple[tuple[str, float, int], ...] = ()


def draw(seed: int) -> FileRecipe:
    """The recipe of a seed; neighbours damage the same file."""
    shared, rng = random.Random(f"file {seed // 8}"), random.Random(f"files {seed}")
    kind = shared.choices(("decoder", "encoder", "states", "layer", "answers"), (4, 1, 2, 1, 1))[0]
    draws = {"decoder": gradients.draw, "encoder": encoders.draw, "states": states.draw, "layer": Layer}
    evidence = ORACLE if kind == "answers" else draws[kind](shared.randrange(1000))
    if isinstance(evidence, UpdateRecipe):
        evidence = replace(gradients.draw(0) if evidence.model == encoders.MINILM else evidence, defences=())
    ways = ("flip", "flip", "flip_header", "flip_header", "cut", "zero", "append", "swap", "edit", "edit")
    damage = [(rng.choice(ways), rng.random(), rng.randrange(10**6)) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
    return FileRecipe(evidence, tuple(damage))


def run(recipe: FileRecipe) -> Outcome:
    """Write, damage, read, attack, judge."""
    try:
        whole = file_bytes(recipe.evidence)
    except unmask.UnmaskError as error:
        return Outcome("not_made", _kind(recipe), refusal=str(error))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence"
        path.write_bytes(damaged(whole, recipe.damage))
        try:
            status, faults = attack_file(recipe, path)
        except unmask.UnmaskError as error:
            faults = () if str(error).strip() else (Fault(CRASH, "refused without a sentence", "no sentence"),)
            return Outcome("refused", _kind(recipe), faults)
    return Outcome(status, _kind(recipe), faults)


def attack_file(recipe: FileRecipe, path: Path) -> tuple[str, tuple[Fault, ...]]:
    """What the attack makes of the file; what is read is judged where the side knowledge in it is as it was."""
    if isinstance(recipe.evidence, OracleRecipe):
        function = oracles.make_function(recipe.evidence)
        oracle = unmask.FunctionOracle(function, recipe.evidence.function)
        recovery = unmask.recover_weights(oracle, width=recipe.evidence.width, ledger=path)
        return recovery.status.name, tuple(oracles.false_layer(recipe.evidence, recovery))
    evidence = unmask.load_evidence(path)
    if isinstance(evidence, AttentionEvidence):
        # Nearly every output has a pre-image, so a changed one may be recovered; it must only end well.
        return unmask.recover_inputs(evidence).status.name, ()
    if isinstance(recipe.evidence, Layer):
        return "other kind", ()
    model, original = _observe(recipe.evidence)
    texts = unmask.recover_text(evidence, model)
    if not same_side_knowledge(evidence, original):
        return texts.status.name, ()
    part = states if isinstance(recipe.evidence, StatesRecipe) else updates
    return texts.status.name, part.judge(recipe.evidence, model, texts).faults


def same_side_knowledge(evidence: Any, original: Any) -> bool:
    """Whether a file still tells the adversary what it told before, tensors aside. A lie there is nobody's fault."""
    if type(evidence) is not type(original):
        return False
    told = [one.name for one in fields(original)]
    pairs = [(getattr(evidence, name), getattr(original, name)) for name in told]
    plain = [(one, other) for one, other in pairs if not isinstance(other, (torch.Tensor, dict))]
    masks = isinstance(original, HiddenEvidence) and not torch.equal(evidence.mask, original.mask)
    return all(one == other for one, other in plain) and not masks


def damaged(whole: bytes, damage: tuple[tuple[str, float, int], ...]) -> bytes:
    """The bytes after everything that happens to them."""
    content = bytearray(whole)
    for how, where, value in damage:
        at = int(where * len(content))
        if how == "flip" and content:
            content[at] ^= 1 << value % 8
        elif how == "flip_header" and content:
            content[int(where * min(len(content), _header_size(content)))] ^= 1 << value % 8
        elif how == "cut":
            del content[at:]
        elif how == "zero":
            content[at : at + value % 400] = bytes(len(content[at : at + value % 400]))
        elif how == "append":
            content += random.Random(value).randbytes(value % 100)
        elif how == "swap":
            content = bytearray(bytes(content).replace(*SWAPS[value % len(SWAPS)]))
        elif how == "edit":
            content = bytearray(_edit_header(bytes(content), where, ODD_VALUES[value % len(ODD_VALUES)]))
    return bytes(content)


@lru_cache(maxsize=4)
def file_bytes(evidence: Any) -> bytes:
    """The file of evidence before anything happens to it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evidence"
        if isinstance(evidence, OracleRecipe):
            oracle = unmask.FunctionOracle(oracles.make_function(evidence), evidence.function)
            unmask.recover_weights(oracle, width=evidence.width, ledger=path)
        elif isinstance(evidence, Layer):
            _layer_evidence(evidence).save(path)
        else:
            _observe(evidence)[1].save(path)
        return path.read_bytes()


def simpler(recipe: FileRecipe) -> Iterator[FileRecipe]:
    """Less damage, then simpler evidence."""
    damage = recipe.damage
    yield from (replace(recipe, damage=damage[:at] + damage[at + 1 :]) for at in range(len(damage)) if len(damage) > 1)
    part: Any = {UpdateRecipe: updates, StatesRecipe: states}.get(type(recipe.evidence))
    if part is not None:
        yield from (replace(recipe, evidence=evidence) for evidence in part.simpler(recipe.evidence))


def reproduce(recipe: FileRecipe) -> str:
    """A few lines of Python that show the failure."""
    return python(
        "from pathlib import Path",
        "from campaign.files import FileRecipe, Layer, OracleRecipe, StatesRecipe, UpdateRecipe",
        "from campaign.files import attack_file, damaged, file_bytes",
        "from campaign.models import ModelRecipe",
        f"recipe = {recipe!r}",
        "path = Path('/tmp/damaged')",
        "path.write_bytes(damaged(file_bytes(recipe.evidence), recipe.damage))",
        "print(attack_file(recipe, path))",
    )


@lru_cache(maxsize=4)
def _observe(evidence: UpdateRecipe | StatesRecipe) -> tuple[Model, GradientEvidence | HiddenEvidence]:
    return states.observe(evidence) if isinstance(evidence, StatesRecipe) else updates.observe(evidence)


def _layer_evidence(layer: Layer) -> AttentionEvidence:
    generator = torch.Generator().manual_seed(layer.seed)
    X, W, V = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    return AttentionEvidence(W, V, (X @ W @ X.T).softmax(1) @ X @ V)


def _header_size(content: bytearray) -> int:
    """The length of a safetensors header with the eight bytes that tell it; at least eight."""
    told = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    return min(8 + told, 8 + 2**16)


def _edit_header(content: bytes, where: float, value: Any) -> bytes:
    """The file with another value under one key of unmask's header; as it is, if it has none any more."""
    try:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        document = json.loads(header["__metadata__"]["unmask"])
        document[sorted(document)[int(where * len(document))]] = value
        header["__metadata__"]["unmask"] = json.dumps(document)
        written = json.dumps(header).encode()
    except (ValueError, KeyError, TypeError, struct.error, IndexError, RecursionError):
        return content
    return struct.pack("<Q", len(written)) + written + content[8 + size :]


def _kind(recipe: FileRecipe) -> str:
    return {UpdateRecipe: "gradients", StatesRecipe: "states", Layer: "layer"}.get(type(recipe.evidence), "answers")


PART = Part("files", draw, run, simpler, reproduce)
