"""The demo in a terminal: who sees what, the texts that were read, and a table of what each defence left."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from unmask.audit.findings.finding import Finding
from unmask.audit.plan import Plan
from unmask.channels import threat_of
from unmask.evidence.gradients import GradientEvidence
from unmask.recovery import RecoveredTexts, Recovery
from unmask.terminal import printable
from unmask.terminal.audit import OUTCOME_COLOURS

_CAPTION = "A defence that stopped this attack is not proven 'safe'; 'inconclusive' means that nothing is known."


def print_first_text(
    console: Console, model: str, text: str, update: GradientEvidence, recovery: Recovery[RecoveredTexts]
) -> None:
    """A text that a client trained on, and what the gradients alone gave back of it."""
    size = sum(gradient.numel() for gradient in update.gradients.values()) / 1e6
    words = Table.grid(padding=(0, 1))
    words.add_row(Text("trained on", style="bold"), Text(printable(text)))
    words.add_row(Text("sent", style="bold"), f"the gradients of {model}, {size:.0f} million numbers")
    for found in recovery.value.texts:
        words.add_row(Text("read", style="bold red"), Text(f"{printable(found.text)} ({found.certainty})"))
    console.print(Panel(words, title="One text, from gradients alone", title_align="left", style="cyan"))


def print_channel(console: Console, channel: str, plan: Plan) -> None:
    """Who the adversary of a channel is, and the part of the plan that is about it."""
    threat = threat_of(channel)
    words = Table.grid(padding=(0, 1))
    for label, sentence in (("who", threat.who), ("sees", threat.sees), ("wants", threat.wants)):
        words.add_row(Text(label, style="bold"), sentence)
    console.print(Panel(words, title=threat.title, title_align="left", style="cyan"))
    groups = [group for group in plan.text.split("\n\n") if f"[[{channel}]]" in group]
    console.print(Syntax("\n\n".join(groups).strip(), "toml", background_color="default", word_wrap=True))


def print_results(console: Console, findings: Sequence[Finding], controls: Collection[str]) -> None:
    """What the first case gave away, then a row for each finding."""
    console.print()
    console.print(Text(f"{findings[0].status}: {printable(findings[0].reason)}", style="bold"))
    texts = Table.grid(padding=(0, 1))
    for pair in findings[0].texts:
        if pair.recovered is not None:
            text = printable("".join(piece for piece, _ in pair.recovered))
            texts.add_row(Text("  certain" if pair.certain else "  guess", style="dim"), Text(text))
    console.print(texts)
    console.print(_table(findings, controls))


def _table(findings: Sequence[Finding], controls: Collection[str]) -> Table:
    of_texts = any("exact_texts" in finding.metrics for finding in findings)
    columns = ("exact", "tokens", "chance") if of_texts else ("answers", "weights off by")
    table = Table(box=SIMPLE_HEAD, caption=_CAPTION, caption_justify="left")
    for column in ("what is seen", "defence", *columns, "outcome"):
        table.add_column(column, justify="right" if column in columns else "left", overflow="fold")
    for finding in findings:
        defences = " + ".join(finding.case["defences"]) or "none"
        defence = f"control: {defences}" if finding.id in controls else defences
        outcome = Text(finding.outcome.value, style=OUTCOME_COLOURS[finding.outcome])
        table.add_row(
            _describe_seen(finding), defence, *(_of_texts(finding) if of_texts else _of_weights(finding)), outcome
        )
    return table


def _describe_seen(finding: Finding) -> str:
    case = finding.case
    words = [case.get("model"), case.get("secret"), f"layer {case['layer']}" if "layer" in case else None]
    words += [case["site"]] if case.get("site", "stream") != "stream" else []
    words.append(case.get("storage"))
    return printable(", ".join(str(word) for word in words if word))


def _of_texts(finding: Finding) -> tuple[str, str, str]:
    if not finding.metrics:
        return "–", "–", "–"
    exact = f"{finding.metrics['exact_texts']:.0f} of {finding.case['batch_size']}"
    return exact, f"{finding.metrics['token_recall']:.0%}", f"{finding.chance['token_recall']:.0%}"


def _of_weights(finding: Finding) -> tuple[str, str]:
    error = finding.metrics.get("weight_error", 1.0)
    return f"{finding.cost.get('queries', 0):,}", f"{error:.0e}" if error < 1 else "not found"
