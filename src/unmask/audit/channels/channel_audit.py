"""How a channel is audited, and what a worker audits with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unmask.audit.cases.case import Case
from unmask.audit.cases.data import DataSet
from unmask.audit.channels.axes import Axis
from unmask.audit.findings.finding import Finding
from unmask.models.adapter import Model
from unmask.models.load import load_model
from unmask.models.outline import Outline

Spec = Mapping[str, Any]


@dataclass
class WorkerContext:
    """What cases are worked on with: the data, a device, and the model that was loaded last."""

    data: Mapping[str, DataSet]
    device: str = "cpu"
    _loaded: dict[tuple[str, str], Model] = field(default_factory=dict)

    def model(self, name: str, dtype: str = "float32") -> Model:
        """A model; it stays loaded until another one is asked for."""
        if (name, dtype) not in self._loaded:
            self._loaded.clear()
            self._loaded[name, dtype] = load_model(name, dtype=getattr(torch, dtype), device=self.device)
        return self._loaded[name, dtype]

    def forget_model(self) -> None:
        """Load the model again when it is asked for."""
        self._loaded.clear()


@dataclass(frozen=True)
class ChannelAudit:
    """The lists that a group of a plan may have, and how one case is audited.

    `find_fault` says what does not go together in a case, `find_model_fault` what a case asks for and its model lacks;
    both are asked before anything runs.
    """

    axes: Mapping[str, Axis]
    run: Callable[[Case, WorkerContext], Finding]
    find_fault: Callable[[Spec], str | None]
    find_model_fault: Callable[[Spec, Outline], str | None]
