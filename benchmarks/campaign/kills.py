"""Audits that are killed with kill -9 at random moments and resumed: the same findings as without, each once."""

from __future__ import annotations

import atexit
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from campaign.models import ModelRecipe, build, word_tokenizer
from campaign.outcome import CRASH, LOST_FINDING, Fault, Outcome, Part, ShortRepr, python
from unmask.audit.findings.finding import Finding, FindingError
from unmask.audit.findings.folder import read_audit

COMMAND = Path(sys.executable).parent / "unmask"
MODELS = {
    "bert": ModelRecipe(family="bert", vocab=100, seed=1),
    "llama": ModelRecipe(family="llama", vocab=100, seed=1),
}
# Words of the small models' tokenizer.
TEXTS = tuple(" ".join(f"w{10 * text + place + 5}" for place in range(3 + text % 3)) for text in range(8))
GROUPS = {
    "queries": '[[queries]]\nsecrets = ["random:heads=1,width=3"]\nseeds = {seeds}\n',
    "gradients": '[[gradients]]\nmodels = ["{bert}"]\ndata = ["notes"]\nbatch_sizes = [1]\nseeds = {seeds}\n',
    "outputs": '[[outputs]]\nmodels = ["{llama}"]\ndata = ["notes"]\nbatch_sizes = [2]\nseeds = {seeds}\n',
}


@dataclass(frozen=True, repr=False)
class KillRecipe(ShortRepr):
    """A plan's groups and seeds, and when each run is killed: shares of the time that an undisturbed one takes."""

    groups: tuple[str, ...]
    num_seeds: int = 3
    moments: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class Undisturbed:
    """The findings of an audit that nobody killed, how it ended and how long it took."""

    findings: dict[str, str]
    code: int
    seconds: float


def draw(seed: int) -> KillRecipe:
    """The recipe of a seed; four plans in all."""
    rng = random.Random(f"kills {seed}")
    groups = (("queries",), ("queries", "gradients"), ("outputs", "queries"), tuple(GROUPS))[seed // 4 % 4]
    # A process needs more than half of its time to import torch; kills before that are dull.
    moments = [rng.uniform(0.3, 1.0) for _ in range(rng.choice((1, 1, 2, 3)))]
    return KillRecipe(groups, 6, tuple(round(moment, 4) for moment in moments))


def run(recipe: KillRecipe) -> Outcome:
    """Kill, resume, compare."""
    expected = undisturbed(recipe.groups, recipe.num_seeds)
    plan = write_plan(recipe.groups, recipe.num_seeds)
    with tempfile.TemporaryDirectory() as folder:
        out, faults = Path(folder) / "out", []
        kept: dict[str, str] = {}
        for moment in recipe.moments:
            kill_audit(plan, out, moment * expected.seconds)
            faults += missing(kept, after := findings_of(out), "after a kill")
            kept = after
        code, said = resume(plan, out)
        found = findings_of(out)
        faults += missing(expected.findings, found, "at the end")
        faults += missing(found, expected.findings, "without kills")
        faults += doubled(out)
        if code != expected.code or "Traceback" in said:
            faults.append(Fault(CRASH, f"exit code {code}, expected {expected.code}: {said[-800:]}", "resumed audit"))
    return Outcome("killed", "+".join(recipe.groups), tuple(faults))


def missing(expected: dict[str, str], found: dict[str, str], when: str) -> list[Fault]:
    """Findings that are gone or changed."""
    lost = [name for name in expected if name not in found]
    changed = [name for name in expected if name in found and found[name] != expected[name]]
    faults = (
        [Fault(LOST_FINDING, f"{len(lost)} of {len(expected)} findings are missing {when}: {lost[:3]}")] if lost else []
    )
    if changed:
        was, now = expected[changed[0]], found[changed[0]]
        faults.append(Fault(LOST_FINDING, f"finding {changed[0]} differs {when}:\n{was}\n{now}", "changed finding"))
    return faults


def doubled(out: Path) -> list[Fault]:
    """Findings that were written twice."""
    names = []
    for path in sorted(out.glob("findings*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                names.append(Finding.from_json(line).id)
            except FindingError:  # torn by a kill; the next run ends the line
                continue
    twice = {name for name in names if names.count(name) > 1}
    return [Fault(LOST_FINDING, f"{len(twice)} findings were written twice", "doubled finding")] if twice else []


def findings_of(out: Path) -> dict[str, str]:
    """Findings by id, without what may differ between runs."""
    if not (out / "manifest.json").exists():
        return {}
    return {found.id: replace(found, run={}).to_json() for found in read_audit(out).findings}


def kill_audit(plan: Path, out: Path, seconds: float) -> None:
    """Start an audit and kill it after so long, unless it has ended."""
    process = subprocess.Popen(_command(plan, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def resume(plan: Path, out: Path) -> tuple[int, str]:
    """An audit to its end: exit code, and what it said."""
    ended = subprocess.run(_command(plan, out), capture_output=True, text=True, timeout=600, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@cache
def undisturbed(groups: tuple[str, ...], num_seeds: int) -> Undisturbed:
    """The audit that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        code, _ = resume(write_plan(groups, num_seeds), Path(folder))
        return Undisturbed(findings_of(Path(folder)), code, time.monotonic() - started)


@cache
def write_plan(groups: tuple[str, ...], num_seeds: int) -> Path:
    """A plan, its texts and its models in a folder that is removed when the process ends."""
    folder = _folder()
    names = {name: _save_model(name) for name in MODELS}
    text = "\n".join(GROUPS[group].format(seeds=list(range(num_seeds)), **names) for group in groups)
    (folder / "notes.txt").write_text("\n".join(TEXTS))
    path = folder / f"{'_'.join(groups)}_{num_seeds}.toml"
    path.write_text('[data.notes]\nfile = "notes.txt"\n' * (groups != ("queries",)) + text)
    return path


def simpler(recipe: KillRecipe) -> Iterator[KillRecipe]:
    """Fewer kills, fewer groups."""
    for at in range(len(recipe.moments) if len(recipe.moments) > 1 else 0):
        yield replace(recipe, moments=recipe.moments[:at] + recipe.moments[at + 1 :])
    for at in range(len(recipe.groups) if len(recipe.groups) > 1 else 0):
        yield replace(recipe, groups=recipe.groups[:at] + recipe.groups[at + 1 :])


def reproduce(recipe: KillRecipe) -> str:
    """A few lines of Python that show the failure; the moment of a kill is a matter of luck."""
    return python("from campaign.kills import KillRecipe, run", f"print(run({recipe!r}))")


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _save_model(name: str) -> Path:
    folder = _folder() / name
    build(MODELS[name]).hf.save_pretrained(folder)
    word_tokenizer(MODELS[name].vocab).save_pretrained(folder)
    return folder


def _command(plan: Path, out: Path) -> list[str]:
    return [str(COMMAND), "audit", str(plan), "--out", str(out), "--threads", "1"]


PART = Part("kills", draw, run, simpler, reproduce, chunk=4, limit_seconds=900.0)
