"""Updates in, findings out: what each client's update gives away, kept in a folder that `unmask report` reads.

Whatever goes wrong in an audit becomes a finding and a line in the log, never an exception: the federation goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch

from unmask.attacks.recover import recover_text
from unmask.audit.cases.case import Case
from unmask.audit.findings.finding import Finding, Outcome
from unmask.audit.findings.result import Clock, error_finding, finding_of
from unmask.audit.findings.text_marks import mark_bag, pair_texts
from unmask.errors import EvidenceError, InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.integrations.federation.update import (
    SHARES,
    Arrays,
    is_same,
    place_weights,
    read_update,
    sent_dtype,
    sent_factors,
)
from unmask.integrations.live_findings import LiveFindings, Program, name_model
from unmask.models.adapter import Model
from unmask.models.load import load_model
from unmask.models.peft_adapters import Scale
from unmask.recovery import RecoveredTexts, Recovery, Status


class Knowledge(TypedDict, total=False):
    """What the server knows of its clients; what is left out must be inferred. See `GradientEvidence`."""

    task: str | None
    num_texts: int | None
    optimizer: str | None
    num_steps: int | None
    learning_rate: float | None
    weight_decay: float | None
    momentum: float | None
    local_batch_size: int | None
    num_clients: int | None
    all_tokens_predicted: bool | None
    adapter_scale: Scale | None
    noise_std: float | None
    compute_dtype: torch.dtype


class AuditOptions(Knowledge, total=False):
    """Options of every audit in a federation.

    `model`: what the federation trains, as for `load_model` (its weights are replaced by those that the server sends);
    `out`: the folder of findings. `keep`: parts of names of tensors to keep, None for those that attacks need. `names`:
    names of the arrays, `list(net.state_dict())`, where clients only number them (`NumPyClient`).
    `shares`: what clients send, 'weights', 'delta' or 'gradient'. `record`: the record of the reply
    that is read, None for 'arrays', or for the first that holds arrays. With `save_evidence` nothing is
    attacked: updates are kept in `out`/evidence for `unmask recover text`.
    """

    model: Required[Any]
    out: Required[str | Path]
    tokenizer: Any
    keep: Sequence[str] | None
    names: Sequence[str] | None
    shares: str
    record: str | None
    save_evidence: bool
    seed: int


class UpdateAudit:
    """Audits one update after the other; the model is loaded at first use.

    `program`: the framework that the federation runs in. `own_file`: each client's findings have a file of their own,
    for clients that share a folder but not a process.
    """

    def __init__(
        self,
        program: Program,
        *,
        model: Any,
        out: str | Path,
        tokenizer: Any = None,
        keep: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        shares: str = SHARES[0],
        record: str | None = None,
        save_evidence: bool = False,
        seed: int = 0,
        own_file: bool = False,
        **knowledge: Unpack[Knowledge],
    ) -> None:
        self.source = model
        self.program = program
        self.findings = LiveFindings(out, program)
        self.tokenizer = tokenizer
        self.keep = keep
        self.names = names
        self.shares = shares
        self.record = record
        self.save_evidence = save_evidence
        self.seed = seed
        self.own_file = own_file
        if self.shares not in SHARES:
            raise InputError(f"shares must be one of {', '.join(SHARES)}, got {self.shares!r}")
        if isinstance(self.keep, str):
            raise InputError(f"keep must be a list of parts of names, got the text {self.keep!r}")
        self.knowledge: dict[str, Any] = dict(knowledge)
        check_knowledge(self.knowledge)
        self._model: Model | None = None
        self._is_changed = False
        self._placed: Arrays | None = None
        self._sent_dtype = torch.float32

    @property
    def folder(self) -> Path:
        """The folder of findings."""
        return self.findings.folder

    @property
    def model_name(self) -> str:
        """The model's name in findings."""
        return name_model(self.source)

    def prepare(self) -> Model:
        """Make the folder, write its manifest, load the model. Mistakes in the options are raised here."""
        if self._model is None:
            model = self.source if isinstance(self.source, Model) else load_model(self.source, tokenizer=self.tokenizer)
            if not isinstance(self.source, (str, Path)):
                model = model.to(dtype=torch.float32)  # the caller's stays as it is
            model.hf.eval()
            self.findings.open(self.source, model.fingerprint())
            self._model = model
        return self._model

    def audit(
        self, server_round: int, client: str, sent: Arrays | None, received: Arrays, unread: Sequence[str] = ()
    ) -> Finding | None:
        """The finding of one client in one round, once it is on the disk; None where only evidence is kept.

        `sent` must not change later, for clients that got the same; None says that nobody holds it any more. `unread`
        names records of the reply beside `received`: nothing is clear while there are any.
        """
        clock = Clock()
        case = self._case(server_round, client)
        try:
            model = self.prepare()
            case = self._case(server_round, client)
            evidence = self._observe(model, sent, received)
            if self.save_evidence and isinstance(evidence, GradientEvidence):
                self._save(evidence, model, case)
                if unread:
                    self.program.log.warning("unmask: round %s, client %s: %s", server_round, client, _not_read(unread))
                return None
            finding = self._attack(evidence, model, case)
            if unread:
                status = Status.MISSING_EVIDENCE.name if finding.outcome is Outcome.NO_LEAK else finding.status
                finding = replace(finding, status=status, reason=f"{finding.reason}; {_not_read(unread)}")
        except Exception as error:
            finding = error_finding(case, error)
        finding = clock.stamp(finding, "none" if self._model is None else str(self._model.device))
        file = f"findings-client-{client}.jsonl" if self.own_file else "findings.jsonl"
        self.findings.keep(finding, f"unmask: round {finding.case['round']}, client {client}", file)
        return finding

    def _observe(self, model: Model, sent: Arrays | None, received: Arrays) -> GradientEvidence | str:
        """The evidence, or why there is none."""
        if sent is None:
            return "the weights that the client got are not held any more: too many versions of them were out"
        if not sent or not received:
            return f"the message to the client holds {len(sent)} arrays and its reply {len(received)}"
        base, received = self._rename(sent), self._rename(received)
        if sent is not self._placed:  # clients of one round got the same
            self._placed = None
            self._is_changed |= place_weights(model, base)
            self._placed, self._sent_dtype = sent, sent_dtype(base)
        update = read_update(model, base, received, keep=self.keep, shares=self.shares)
        if not update:
            return f"none of the {len(received)} arrays of the reply is a tensor that was asked to be kept"
        if not any(bool(tensor.any()) for tensor in update.values()) and not is_same(base, received):
            return f"none of the {len(update)} tensors kept has changed, only others that no attack reads"
        options = {"compute_dtype": self._sent_dtype, "adapters": sent_factors(model, base), **self.knowledge}
        kind = "gradient" if self.shares == "gradient" else "delta"
        return GradientEvidence.of(model, update, update=kind, **options)

    def _rename(self, arrays: Arrays) -> Arrays:
        if self.names is None:
            return arrays
        if len(self.names) != len(arrays):
            raise EvidenceError(f"a message holds {len(arrays)} arrays, but `names` has {len(self.names)}")
        return dict(zip(self.names, arrays.values(), strict=True))

    def _attack(self, evidence: GradientEvidence | str, model: Model, case: Case) -> Finding:
        if isinstance(evidence, str):
            return Finding(case.id, case.spec, Status.MISSING_EVIDENCE.name, evidence)
        if not any(bool(tensor.any()) for tensor in evidence.gradients.values()):
            reason = "the client sent back exactly what it got"
            return Finding(case.id, case.spec, Status.NOTHING_FOUND.name, reason, used=tuple(evidence.gradients))
        recovery = recover_text(evidence, model, seed=self.seed)
        return finding_of(case, model, recovery, _document(recovery, model))

    def _save(self, evidence: GradientEvidence, model: Model, case: Case) -> None:
        """The update in a file, and the weights of its round in a folder, unless the model's name stands for them."""
        folder = self.folder / "evidence"
        folder.mkdir(mode=0o700, exist_ok=True)
        stem = f"round-{case['round']}-client-{case['client']}"
        number, path = 1, folder / f"{stem}.safetensors"
        while path.exists():
            number += 1
            path = folder / f"{stem}-{number}.safetensors"
        name = self.model_name
        if self._is_changed or not isinstance(self.source, (str, Path)):
            name = str(folder / f"model-{evidence.model_fingerprint[:12]}")
            if not Path(name).is_dir():
                model.hf.save_pretrained(name)
                if model.tokenizer is not None:
                    model.tokenizer.save_pretrained(name)
        evidence.save(path)
        command = shlex.join(["unmask", "recover", "text", str(path), "--model", name])
        self.program.log.info("unmask: kept; read it with `%s`", command)

    def _case(self, server_round: int, client: str) -> Case:
        """The specification; an update of a client that came before in this round is a further exchange.

        It says nothing of defences: nobody but the client knows them.
        """
        spec = {
            "channel": "gradients",
            "model": self.model_name,
            "protocol": self.program.name,
            "source": self.program.name,
            "round": server_round,
            "client": client,
            "attack": "default",
            "seed": self.seed,
        }
        if self.knowledge.get("task") is not None:
            spec["task"] = str(self.knowledge["task"])
        return self.findings.new_case(spec)


def check_knowledge(knowledge: Mapping[str, Any]) -> None:
    """Refuse side knowledge that no evidence takes, before the first round."""
    known = set(Knowledge.__annotations__)
    if strangers := sorted(set(knowledge) - known):
        raise InputError(
            f"unknown option {strangers[0]!r}; what the server knows is said by {', '.join(sorted(known))}"
        )
    try:
        GradientEvidence({}, "", **knowledge)
    except ValueError as error:  # a task that is none
        raise InputError(f"{error}; see GradientEvidence for what can be said of clients") from None


def _not_read(unread: Sequence[str]) -> str:
    names = ", ".join(map(repr, unread))
    return f"the reply holds arrays that were not read, in {names} (`record` chooses what is read)"


def _document(recovery: Recovery[RecoveredTexts], model: Model) -> dict[str, Any]:
    """Nobody here knows the secret, so there are no scores; the bag of words is left out where certain texts say it."""
    told = {token for text in recovery.value.certain for token in text.tokens}
    return {
        "texts": pair_texts(recovery.value, None, (), model),
        "tokens": () if recovery.value.token_set <= told else mark_bag(recovery.value, None, model),
    }
