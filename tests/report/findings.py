"""Invented findings of all channels and outcomes, with several seeds, and folders that hold them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unmask.audit.cases.case import Case, case_id
from unmask.audit.findings.finding import ERROR, Finding, TextPair
from unmask.audit.findings.folder import MANIFEST, Audit
from unmask.audit.findings.verdict import Verdict, reach_verdict
from unmask.audit.running.worker import control_case

SENTENCES = (
    "the spare key lies under the blue pot by the door",
    "her biopsy was positive and treatment starts on monday",
    "please wire the deposit to the new account before noon",
    "the board will announce the merger on the ninth of march",
)
HOSTILE = (
    "<script>window.hacked = true; alert(1)</script>",
    "</script><script>window.hacked = true</script>",
    "<!-- <script> --> ]]> <![CDATA[ x",
    "<img src=x onerror='window.hacked=true'>",
    "\u202egnp.exe\u2066 \u200b\u200d\ufeff zero width",
    "\x00\x07\x1b[31m bell and escape \x7f\x85",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "\"quotes' `ticks` | pipe | [link](javascript:alert(1)) @everyone #1",
    "\ud800 lone surrogate \uffff",
)
NOISES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def marked(text: str, recall: float, rng: random.Random) -> tuple[tuple[str, str], ...]:
    """A text in pieces of which about this share is marked as known; the order is known only where all of it is."""
    words = text.split(" ")
    known = [rng.random() < recall for _ in words]
    marks = ["no" if not is_known else "bag" if recall < 1 and rng.random() < 0.5 else "place" for is_known in known]
    pieces = (word if place == 0 else f" {word}" for place, word in enumerate(words))
    return tuple(zip(pieces, marks, strict=True))


def text_case(channel: str = "gradients", **changes: Any) -> dict[str, Any]:
    case: dict[str, Any] = {"channel": channel, "model": "smollm2-135m", "dtype": "float32"}
    case |= {"data": {"name": "notes", "sha256": "ab" * 32}, "batch_size": 4}
    case |= {"task": "next_token", "protocol": "fedsgd"} if channel == "gradients" else {"layer": 6, "site": "stream"}
    return {**case, "defences": [], "attack": "default", "seed": 0, **changes}


def text_finding(case: Mapping[str, Any], recall: float, exact: int = 0, **changes: Any) -> Finding:
    """What an attack on texts gave: `recall` of the tokens, and the first `exact` texts whole."""
    rng = random.Random(case_id(case))
    size = int(case["batch_size"])
    shown = [SENTENCES[number % len(SENTENCES)] for number in range(min(size, 4))]
    texts = tuple(
        TextPair(
            true=marked(text, 1.0 if number < exact else recall, rng),
            recovered=marked(text, 1.0 if number < exact else recall, rng) if recall else None,
            certain=number < exact,
            exact=number < exact,
        )
        for number, text in enumerate(shown)
    )
    status = "RECOVERED" if exact == size else "PARTIAL" if recall > 0.02 else "NOTHING_FOUND"
    return replace(
        Finding(
            id=case_id(case),
            case=case,
            status=status,
            reason=f"{exact} of {size} texts are certain; {round(100 * recall)} % of tokens lie in the span",
            metrics={
                "exact_texts": exact,
                "exact_rate": exact / size,
                "near_exact_texts": exact,
                "token_recall": recall,
                "token_precision": 1.0 if recall else 0.0,
                "rouge1": recall,
                "rouge2": recall**2,
            },
            chance={"exact_rate": 0.0, "token_recall": 0.06, "token_precision": 0.05, "rouge1": 0.08, "rouge2": 0.004},
            texts=texts,
            certificate={
                "claim": "every token that is claimed lies in the span of block 0's gradients",
                "residual": 3.1e-7 if recall else None,
                "tolerance": 2.4e-4,
                "rejected": 0.11,
                "details": {"rank": 47.0, "expected_false_tokens": 0.5},
                "holds": recall > 0,
            },
            cost={"candidates": 1_900_000 + rng.randrange(10**5), "forward_passes": 0, "queries": 0},
            used=("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
            model_fingerprint="5f" * 16,
            looked_for=("texts", "tokens"),
            control=control(
                case, exact_texts=size, near_exact_texts=size, exact_rate=1.0, token_recall=1.0, rouge2=1.0
            ),
            run={"seconds": round(2 + 6 * rng.random(), 2), "started": "2026-11-15T20:00:00+00:00", "device": "cpu"},
        ),
        **changes,
    )


def control(case: Mapping[str, Any], **metrics: float) -> dict[str, Any] | None:
    """What the same attack gives where nothing protects: everything."""
    plain = control_case(Case(case))
    if plain is None:
        return None
    return {"id": plain.id, "case": dict(plain.spec), "status": "RECOVERED", "reason": "all of it", "metrics": metrics}


def inconclusive(case: Mapping[str, Any], status: str = "NOT_APPLICABLE", **changes: Any) -> Finding:
    why = "no direction of the gradients is above the noise: noise 1.0e-02, signal 3.4e-03"
    return text_finding(case, 0.0, **{"status": status, "reason": why, "certificate": {}, **changes})


def failed(case: Mapping[str, Any], kind: str = "RuntimeError", message: str = "out of memory") -> Finding:
    trace = f'Traceback (most recent call last):\n  File "runner.py", line 1, in run\n{kind}: {message}'
    return Finding(
        case_id(case),
        case,
        ERROR,
        f"{kind}: {message}",
        error={"type": kind, "message": message, "traceback": trace},
        run={"seconds": 0.4},
    )


def query_finding(rate: float, seed: int = 0, **changes: Any) -> Finding:
    case = {"channel": "queries", "model": "smollm2-135m", "secret": "attention:layer=15", "defences": []}
    case = {**case, "attack": "default", "seed": seed, **changes}
    return Finding(
        id=case_id(case),
        case=case,
        status="RECOVERED" if rate else "NOTHING_FOUND",
        reason="48 fresh sequences are answered as the layer does" if rate else "fresh sequences disagree",
        metrics={"weights_found": float(rate > 0), "weights_rate": rate, "weight_error": 5e-13 if rate else 1.0},
        chance={"weights_found": 0.0, "weights_rate": 0.0, "weight_error": 1.0},
        certificate={
            "claim": "answers to 48 fresh sequences agree",
            "residual": 2e-12,
            "tolerance": 1e-8,
            "rejected": None,
            "details": {},
            "holds": rate > 0,
        },
        looked_for=("weights",),
        control=control(case, weights_found=1, weights_rate=1.0, weight_error=0.0),
        cost={"candidates": 0, "forward_passes": 0, "queries": 36_864},
        run={"seconds": 11.2},
    )


def flower_finding(client: str = "7239846", **changes: Any) -> Finding:
    case = {"channel": "gradients", "model": "minilm-l6", "protocol": "flower", "source": "flower", "round": 1}
    case = {**case, "client": client, "attack": "default", "seed": 0}
    return replace(
        Finding(
            case_id(case),
            case,
            "PARTIAL",
            "rows of the embedding that moved name 12 tokens",
            tokens=tuple((word, "bag") for word in SENTENCES[0].split()),
            certificate={"claim": "rows that never moved are exactly zero", "residual": 0.0, "tolerance": 1e-9}
            | {"rejected": None, "details": {}, "holds": True},
        ),
        **changes,
    )


def realistic() -> list[Finding]:
    """An audit as somebody would run it: three channels, two models, three seeds, noise, DP-SGD, batch sizes."""
    found = []
    for seed in range(3):
        rng = random.Random(seed)
        for size in (1, 4, 16, 64):
            kept = min(1.0, max(0.0, 1.04 - 0.0007 * size * size / 4 + rng.uniform(-0.08, 0)))
            found.append(text_finding(text_case(batch_size=size, seed=seed), 1.0, size if size < 64 else 41 + seed))
            encoder = {"model": "minilm-l6", "task": "classification"}
            found.append(text_finding(text_case(batch_size=size, seed=seed, **encoder), kept, round(size * kept**6)))
        for level, recall in zip(NOISES, (1.0, 0.98, 0.83, 0.3, 0.0), strict=True):
            for size, shift in ((4, 0.0), (16, -0.09)):
                case = text_case(batch_size=size, seed=seed, defences=[f"noise:sigma={level:g}"])
                value = recall and max(0.03, min(1.0, recall + (shift + rng.uniform(-0.06, 0.04)) * (recall < 1)))
                found.append(text_finding(case, value) if recall else inconclusive(case))
        for multiplier, recall, epsilon in ((1e-4, 0.76, 5e7), (1e-3, 0.22, 5e5), (1e-2, 0.08, 5.3e3), (1.0, 0.0, 0.9)):
            case = text_case(
                seed=seed, protocol=f"dpsgd:noise_multiplier={multiplier:g},max_grad_norm=1,dataset_size=1000"
            )
            one = text_finding(case, recall and recall + rng.uniform(-0.05, 0.05))
            found.append(replace(one, metrics={**one.metrics, "epsilon": epsilon}))
        for defences in ([], ["bf16"], ["noise:sigma=0.5"]):
            recall = 0.0 if "noise:sigma=0.5" in defences else 1.0
            found.append(
                text_finding(text_case("outputs", seed=seed, defences=defences), recall, 4 if recall == 1 else 0)
            )
        found.append(query_finding(1.0, seed))
        found.append(query_finding(1.0, seed, defences=["round:decimals=2"]))
        found.append(query_finding(0.0, seed, defences=["norm:max_norm=50"]))
    found.append(inconclusive(text_case(protocol="lora:rank=8"), "NOT_IDENTIFIABLE"))
    found.append(failed(text_case(batch_size=256)))
    return found


def many(number: int) -> list[Finding]:
    """Findings with four texts of twenty tokens each."""
    rng = random.Random(1)
    found = []
    for seed in range(number):
        case = text_case(seed=seed, defences=[[], ["int8"], [f"noise:sigma={rng.choice(NOISES):g}"]][seed % 3])
        one = text_finding(case, rng.choice((0.0, 0.4, 1.0)), exact=0)
        pairs = tuple(
            TextPair(*(tuple((f" word{rng.randrange(9999)}", "place") for _ in range(20)) for _ in range(2)))
            for _ in range(4)
        )
        found.append(replace(one, texts=pairs))
    return found


def audit_of(
    findings: Iterable[Finding],
    gates: Sequence[str] = (),
    missing: Sequence[Mapping[str, Any]] = (),
    title: str = "Release gate",
) -> Audit:
    """An audit whose plan has these cases, and more that were not run."""
    findings = tuple(findings)
    cases = [{"id": finding.id, "gates": list(gates), "line": 12, "case": dict(finding.case)} for finding in findings]
    cases += [{"id": case_id(case), "gates": list(gates), "line": 30, "case": dict(case)} for case in missing]
    manifest = {
        "schema": 1,
        "unmask": "0.1.0",
        "engine": "local",
        "threads": 2,
        "created": "2026-11-15T20:00:00+00:00",
        "command": "unmask audit plan.toml --out runs/release",
        "plan": {"path": "plan.toml", "sha256": "c4" * 32, "title": title},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.22.2"},
        "hardware": {"cpu": "Intel Xeon", "cores": 2, "memory_gib": 24, "gpu": None},
        "models": {"smollm2-135m": {"files": {"model.safetensors": "0d" * 32}}},
        "data": {"notes": {"sha256": "ab" * 32, "num_texts": 256, "path": "texts.txt"}},
        "cases": cases,
    }
    return Audit(manifest, findings)


def verdict_of(findings: Iterable[Finding], gates: Sequence[str] = (), controls: Iterable[Finding] = ()) -> Verdict:
    """The verdict on an audit with these findings, and with controls that have no gate."""
    without = audit_of(controls)
    planned = audit_of(findings, gates)
    manifest = {**planned.manifest, "cases": [*planned.planned, *without.planned]}
    return reach_verdict(Audit(manifest, (*planned.findings, *without.findings)))


def write_audit(folder: Path, audit: Audit) -> Path:
    """The folder as the auditor leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps(audit.manifest))
    (folder / "findings.jsonl").write_text("".join(finding.to_json() + "\n" for finding in audit.findings))
    return folder
