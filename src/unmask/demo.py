"""The tour: a client's texts, its gradients, the recovery from a file, a defence and two controls. On real weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unmask.attacks.text import recover_text
from unmask.defences import add_gaussian_noise
from unmask.evidence import GradientEvidence, load_evidence
from unmask.models import Model, load_model
from unmask.protocols import observe_gradients
from unmask.recovery import RecoveredTexts, Recovery
from unmask.scores import TextScore, score_texts
from unmask.show import print_text_recovery, progress_bar, text_recovery_document, working

# Invented: nobody's data.
TEXTS = (
    "Patient Maria Keller, born 4 May 1961, was admitted with chest pain and shortness of breath.",
    "Please wire 48,200 euros to the account that ends in 7713 before Friday noon.",
    "The merger with Northwind stays confidential until the board has voted.",
    "My new address is 18 Harbour Lane, second floor, ring at Petersen.",
    "She told me that she has been seeing a therapist since last winter.",
    "The password of the shared drive is still the name of our first dog.",
    "We will close the plant in Leeds in March and let 120 people go.",
    "The biopsy was positive, and the treatment starts on Monday.",
    "He failed the drug test twice, so the offer was withdrawn.",
    "Our real margin is eleven percent, not the eighteen in the brochure.",
    "The children are alone at home from three to five every weekday.",
    "I voted for the other party this time, do not tell my father.",
    "The spare key lies under the blue flower pot behind the garage.",
    "The witness lives in Graz now and works at the central station.",
    "Her salary is 96,000 a year, with a bonus of two months in December.",
    "The prototype fails above 60 degrees, and the customer must not know.",
)
NOISE_LEVELS = (1e-7, 1e-5, 1e-3)


def run_demo(out: Path, num_texts: int) -> bool:
    """Run the tour; True if every text was recovered exactly and the controls recovered none."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    with working("loading SmolLM2-135M (the first time its weights are converted, about half a minute)"):
        model = load_model("smollm2-135m")
    texts = TEXTS[:num_texts]
    console.print(Panel("A client trains SmolLM2-135M on its texts and sends the gradients. You are the server."))
    path = out / "update.safetensors"
    with working(f"the client computes its gradients on {num_texts} texts"):
        observe_gradients(model, texts).save(path)
    evidence = load_evidence(path)  # from here on, only the file is known
    recovery = _recover(evidence, model)
    print_text_recovery(recovery, model, json=False)
    score = _score(recovery, texts, model)
    console.print(Text(f"score: {score.exact_rate:.0%} of the texts exact, {score.num_false} false", style="bold"))
    rows = [("nothing", recovery, score)]
    generator = torch.Generator().manual_seed(0)
    for level in NOISE_LEVELS:
        noisy = add_gaussian_noise(evidence, level, generator, relative=True)
        rows.append((f"Gaussian noise, {level:g} × rms", *_attack(noisy, model, texts)))
    control = _attack(_noise_of_same_norm(evidence, generator), model, texts)
    rows.append(("control: noise alone, same norm", *control))
    console.print(_table(rows))
    result = {
        name: {"exact_rate": s.exact_rate, "rouge2": s.rouge2, "token_recall": s.token_recall, "status": r.status.name}
        for name, r, s in rows
    }
    document = {"recovery": text_recovery_document(recovery, model), "defences": result}
    (out / "result.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    console.print(Text(f"everything is in {out / 'result.json'}"))
    return score.exact_rate == 1.0 and control[1].exact_rate == 0.0


def _recover(evidence: GradientEvidence, model: Model) -> Recovery[RecoveredTexts]:
    with progress_bar() as progress:
        return recover_text(evidence, model, progress=progress)


def _attack(
    evidence: GradientEvidence, model: Model, texts: tuple[str, ...]
) -> tuple[Recovery[RecoveredTexts], TextScore]:
    recovery = _recover(evidence, model)
    return recovery, _score(recovery, texts, model)


def _score(recovery: Recovery[RecoveredTexts], texts: tuple[str, ...], model: Model) -> TextScore:
    return score_texts(recovery.value.expanded(), [model.encode(text) for text in texts], model.decode)


def _noise_of_same_norm(evidence: GradientEvidence, generator: torch.Generator) -> GradientEvidence:
    noise = {name: torch.randn(gradient.shape, generator=generator) for name, gradient in evidence.gradients.items()}
    scaled = {
        name: noise[name] * (gradient.norm() / noise[name].norm()) for name, gradient in evidence.gradients.items()
    }
    return replace(evidence, gradients=scaled)


def _table(rows: list[tuple[str, Recovery[RecoveredTexts], TextScore]]) -> Table:
    table = Table(
        "defence", "status", "texts exact", "ROUGE-2", "tokens read", title="Which defence stops this attack?"
    )
    for name, recovery, score in rows:
        num_tokens = len(recovery.value.token_set)
        table.add_row(name, recovery.status.name, f"{score.exact_rate:.0%}", f"{score.rouge2:.2f}", str(num_tokens))
    table.caption = "A defence that stops one attack is not safe: it is a defence that was measured against one attack."
    return table
