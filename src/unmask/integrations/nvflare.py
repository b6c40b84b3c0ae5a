"""NVFlare: what each client's update gives away, with a filter of the job, on a client's side or on the server's.

    "task_data_filters":   [{"tasks": ["train"], "filters": [{"path": "unmask.integrations.nvflare.AuditFilter", …}]}]
    "task_result_filters": [{"tasks": ["train"], "filters": [{"path": "unmask.integrations.nvflare.AuditFilter", …}]}]

The first one sees the weights that go to a client, the second one what comes back: WEIGHT_DIFF or WEIGHTS. Both let
everything pass as it is. `docs/nvflare.md` has the whole story.

Limits: one DXO of a result is one update; encrypted ones cannot be read, and are findings that say so.
Cost: one copy of the model and one of the weights that were sent, in the process of the filter.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import numpy as np
import torch

from unmask.errors import EvidenceError
from unmask.integrations.federation.audit import UpdateAudit
from unmask.integrations.federation.refusal import refused_outcomes
from unmask.integrations.live_findings import Program

try:
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
    from nvflare.apis.fl_constant import FilterKey, FLContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.app_constant import AppConstants
except ImportError as error:
    raise ImportError(
        f"this module is about NVFlare ({error}); install it with: pip install 'unmask[nvflare]'"
    ) from None

log = logging.getLogger("unmask.nvflare")
NVFLARE = Program("nvflare", "nvflare simulator", log)
_KINDS = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
_lock = threading.Lock()  # servers filter replies in threads; audits run one after the other
_sent: dict[tuple[str, str, str], dict[str, Held]] = {}  # by folder, job and client; filters of a job share them


class AuditFilter(DXOFilter):
    """Audits what leaves a client; put it into the chains of task data and of task results, last in the latter.

    `model`: what the federation trains, as for `load_model`; its weights are replaced by those that the server sends.
    `out`: the folder of findings. `shares`: what a result holds, None as its kind says, 'gradient' for clients that put
    gradients into it. `save_evidence`: attack nothing now, keep updates for `unmask recover text`. `refuse`: on a
    client's side, block an update whose audit is not clear (True), or one that leaks ('leaks'). `knowledge`: what the
    server knows of its clients, by the names of `GradientEvidence`. All of it can be said in JSON.
    """

    def __init__(
        self,
        model: str,
        out: str,
        shares: str | None = None,
        save_evidence: bool = False,
        refuse: bool | str = False,
        keep: list[str] | None = None,
        seed: int = 0,
        knowledge: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(supported_data_kinds=_KINDS, data_kinds_to_filter=_KINDS)
        self.model, self.out, self.shares = model, out, shares
        self.save_evidence, self.refuse, self.keep, self.seed = save_evidence, refuse, keep, seed
        self.knowledge = knowledge
        self._refused = refused_outcomes(refuse, save_evidence=save_evidence)
        options: dict[str, Any] = {"keep": keep, "save_evidence": save_evidence, "seed": seed, **(knowledge or {})}
        if shares is not None:
            options["shares"] = shares
        self._audit = UpdateAudit(NVFLARE, model=model, out=out, **options)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Remember what is sent, audit what comes back; None: nothing is changed."""
        chain = self.get_prop(FilterContextKey.CHAIN_TYPE)
        is_result = chain == FilterChainType.TASK_RESULT_CHAIN
        direction = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION)
        on_client = direction == (FilterKey.OUT if is_result else FilterKey.IN)
        finding = None
        try:
            with _lock:
                client = client_name(fl_ctx, on_client)
                key = (self.out, str(fl_ctx.get_job_id()), client)
                arrays = {name: Held(name, value) for name, value in dxo.data.items()}
                if not is_result:
                    _sent[key] = {name: held.copy() for name, held in arrays.items()}
                else:
                    self._audit.own_file = on_client  # clients of a simulation share a folder, and no process
                    if self.shares is None:
                        self._audit.shares = "delta" if dxo.data_kind == DataKind.WEIGHT_DIFF else "weights"
                    if key not in _sent:
                        log.warning(
                            "unmask: nobody saw the weights that %s got; put the filter into task_data_filters "
                            "of the same side, with the same `out`",
                            client,
                        )
                    finding = self._audit.audit(round_of(shareable, fl_ctx), client, _sent.get(key, {}), arrays)
        except Exception as error:
            log.warning("unmask: a message could not be audited, nothing is known of it: %r", error)
        if on_client and finding is not None and finding.outcome in self._refused:
            raise ContentBlockedException(
                f"unmask: this client does not send its update, since the audit says: {finding.outcome.value}"
            )


class Held:
    """An array of a DXO, of numpy or torch; read when it is needed."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def numpy(self) -> Any:
        """The array; what is none, as ciphertext, is refused."""
        value = self.value
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
        if not isinstance(value, np.ndarray | np.generic):
            raise EvidenceError(
                f"{self.name!r} must be an array, got {type(value).__name__}; put the audit before filters that encrypt"
            )
        return np.asarray(value)

    def copy(self) -> Held:
        """The same array, which nobody else can change."""
        return Held(self.name, self.numpy().copy())


def client_name(fl_ctx: FLContext, on_client: bool) -> str:
    """The name of the client, fit for the name of a file."""
    known = fl_ctx if on_client else fl_ctx.get_peer_context()
    return re.sub(r"[^\w.-]", "_", str(known.get_identity_name() or "unknown")) if known is not None else "unknown"


def round_of(shareable: Shareable, fl_ctx: FLContext) -> int:
    """The round as people count, from 1; NVFlare's workflows count from 0."""
    said = (
        shareable.get_header(AppConstants.CURRENT_ROUND),
        shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND),
        fl_ctx.get_prop(AppConstants.CURRENT_ROUND),
    )
    return next((number for number in said if isinstance(number, int)), 0) + 1
