"""Hugging Face's Trainer: what a server would have read off a step, with one callback more.

    trainer = Trainer(model, args, train_dataset=…, callbacks=[AuditCallback("runs/trainer-audit", steps=[1, 100])])

At the chosen steps the update of this training goes to the attack, with the weights that a server would know. The
batch itself is kept for the scores only. Training is not changed: weights and random numbers are the same, bit for bit,
with and without the callback. `docs/trainer.md` has the whole story.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from transformers import TrainerCallback

from unmask.arguments import require_count
from unmask.attacks.recover import recover_text
from unmask.attacks.table import DEFAULT, Secret, parse_attack
from unmask.audit.cases.case import Case
from unmask.audit.channels.text_scores import text_result
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import Clock, error_finding, finding_of
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.integrations.federation.audit import Knowledge, check_knowledge
from unmask.integrations.live_findings import LiveFindings, Program, name_model
from unmask.integrations.trainer.settings import Settings, compute_dtype, join_steps, read_optimizer
from unmask.integrations.trainer.step import (
    BatchRecorder,
    Rows,
    copy_model,
    keep_randomness,
    open_model,
    read_change,
    read_gradients,
)
from unmask.recovery import Status

log = logging.getLogger("transformers.unmask")  # shown where the Trainer's own lines are
PROGRAM = Program("trainer", "Trainer.train", log)
SHARES = ("gradient", "delta")


@dataclass
class Round:
    """A step, or several, whose update is audited: its first step, the weights before it, settings of each step."""

    first: int
    before: nn.Module | None = None
    problem: Exception | None = None
    steps: list[Settings] = field(default_factory=list)


class AuditCallback(TrainerCallback):
    """Audits chosen steps of a training.

    `steps` are numbers of optimizer steps, the first is 1; `every` adds each n-th one. `shares`: what a server would
    get, 'gradient' of the step or 'delta', the change of the weights over `local_steps` steps. `tokenizer` is the
    Trainer's unless given. Further options say what the server knows (`GradientEvidence`): the precision is stated by
    itself, of deltas also the optimizer's settings; None takes a statement back.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        steps: Iterable[int] = (1,),
        every: int | None = None,
        shares: str = SHARES[0],
        local_steps: int = 1,
        tokenizer: Any = None,
        attack: str = DEFAULT,
        seed: int = 0,
        **knowledge: Unpack[Knowledge],
    ) -> None:
        self.steps = frozenset(steps)
        for step in self.steps:
            require_count("steps", step)
        require_count("every", every)
        require_count("local_steps", local_steps)
        if shares not in SHARES:
            raise InputError(f"shares must be one of {', '.join(SHARES)}, got {shares!r}")
        if shares == "gradient" and local_steps != 1:
            raise InputError(f"a gradient is of one step, got local_steps={local_steps}; take shares='delta'")
        if attack != DEFAULT:
            parse_attack(attack, "gradients", Secret.TEXTS, Secret.TOKENS)
        check_knowledge(knowledge)
        self.every, self.shares, self.local_steps = every, shares, local_steps
        self.tokenizer, self.attack, self.seed = tokenizer, attack, seed
        self.knowledge: dict[str, Any] = dict(knowledge)
        self.findings = LiveFindings(out, PROGRAM)
        self._recorder = BatchRecorder()
        self._round: Round | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Open the folder and listen. Mistakes in the options are raised here, before the first step."""
        if args.world_size > 1:
            raise InputError(
                f"this training runs in {args.world_size} processes: gradients are of all of them, the texts of one "
                "only; audit a training in one process"
            )
        self.findings.open(name_model(model))
        self._recorder.attach(model)
        self._round = None

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """The texts of the step before are over; a round may begin."""
        if self._round is not None:
            return
        self._recorder.begin()
        if self._is_chosen(state.global_step + 1):
            self._round = Round(state.global_step + 1)
            if self.shares == "delta":
                self._copy(self._round, model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """The gradients of the step are whole now."""
        if self._round is not None and self.shares == "gradient":
            self._copy(self._round, model)
            self._finish(args, model, others)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """The weights have moved."""
        if self._round is not None:
            self._round.steps.append(read_optimizer(others.get("optimizer")))
            if len(self._round.steps) == self.local_steps:
                self._finish(args, model, others)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """A round that the end of the training cut short is audited as far as it went."""
        if self._round is not None and self._round.steps:
            self._finish(args, model, others)
        self._round = None
        self._recorder.detach()

    def _is_chosen(self, step: int) -> bool:
        return step in self.steps or (self.every is not None and step % self.every == 0)

    def _copy(self, current: Round, model: nn.Module) -> None:
        try:
            current.before = copy_model(model, self._recorder)
        except Exception as error:  # memory, above all
            current.problem = error

    def _finish(self, args: Any, model: nn.Module, others: dict[str, Any]) -> None:
        """Attack, score, keep. Whatever goes wrong is a finding."""
        assert self._round is not None
        current, self._round = self._round, None
        clock, rows = Clock(), self._recorder.rows
        case = self.findings.new_case(self._spec(model, current, len(rows)))
        with keep_randomness():
            try:
                finding = self._attack(case, current, args, model, rows, others)
            except Exception as error:
                finding = error_finding(case, error)
            finding = clock.stamp(finding, str(args.device))
        self.findings.keep(finding, f"unmask: step {current.first}")

    def _attack(
        self, case: Case, current: Round, args: Any, model: nn.Module, rows: Rows, others: Mapping[str, Any]
    ) -> Finding:
        """The attack gets the update and the weights before it; its result is compared with the texts."""
        if current.problem is not None:
            raise current.problem
        assert current.before is not None
        opened = open_model(current.before, self.tokenizer or others.get("processing_class"))
        if self.shares == "gradient":
            update = read_gradients(model, opened)
        else:
            update = read_change(model, current.before, opened)
        if not any(bool(tensor.any()) for tensor in update.values()):
            reason = f"none of the {len(update)} tensors that attacks read is trained, or has changed"
            return Finding(case.id, case.spec, Status.MISSING_EVIDENCE.name, reason)
        known = {
            "compute_dtype": compute_dtype(args, model),
            **join_steps(current.steps, is_fresh=current.first == 1),
            **self.knowledge,
        }
        evidence = GradientEvidence.of(opened, update, update=self.shares, **known)
        recovery = recover_text(evidence, opened, attack=self.attack, seed=self.seed)
        # What somebody may guess who never saw the update: the texts of the step before.
        return finding_of(case, opened, recovery, text_result(recovery, rows, self._recorder.earlier_rows, opened))

    def _spec(self, model: nn.Module, current: Round, num_rows: int) -> dict[str, Any]:
        """The case; it names the number of texts, and nothing of them."""
        fedavg = f"fedavg:local_steps={len(current.steps)}"
        spec = {
            "channel": "gradients",
            "model": name_model(model),
            "protocol": "fedsgd" if self.shares == "gradient" else fedavg,
            "source": PROGRAM.name,
            "step": current.first,
            "attack": self.attack,
            "seed": self.seed,
        }
        if num_rows:
            spec["batch_size"] = num_rows
        if self.knowledge.get("task") is not None:
            spec["task"] = str(self.knowledge["task"])
        return spec
