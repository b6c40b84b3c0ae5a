"""Heads, and a network behind them, that were recovered from answers: for people, for machines, and as a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unmask.terminal import finite, print_json, print_proof_and_cost, print_summary, recovery_document
from unmask.wording import count_noun

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.attacks.queries.profile import OracleProfile
    from unmask.evidence.ledger import Ledger
    from unmask.linalg.relu import ReluNetwork
    from unmask.recovery import Recovery


def print_oracle_profile(profile: OracleProfile) -> None:
    """What kind of answers an oracle gives, before anything is learned from it."""
    console = Console()
    console.print(Text("the oracle", style="bold"))
    for sentence in profile.describe():
        console.print(Text(f"  {sentence}"))


def weights_recovery_document(recovery: Recovery[Any], profile: OracleProfile | None, ledger: Ledger) -> dict[str, Any]:
    """A recovery of heads and of a network as plain data; the matrices themselves go to a file."""
    oracle = None
    if profile is not None:
        entries = {name: finite(value) for name, value in asdict(profile).items()}
        oracle = {**entries, "sentences": profile.describe()}
    queries = {"asked": ledger.num_asked, "paid_now": ledger.num_paid, "in_ledger": len(ledger)}
    network = _network(recovery)
    value = {
        "oracle": oracle,
        "heads": _heads(recovery),
        "network": None if network is None else {"inputs": len(network.linear), "neurons": len(network)},
        "queries": queries,
        "not_identifiable": _NEVER_TOLD,
    }
    return recovery_document(recovery, value)


def print_weights_recovery(
    recovery: Recovery[Any], profile: OracleProfile | None, ledger: Ledger, out: Path | None, json: bool
) -> None:
    """The heads, why they can be believed, what they cost, and what would have stopped it."""
    if json:
        document = weights_recovery_document(recovery, profile, ledger)
        print_json({**document, "written": None if out is None else str(out)})
        return
    console = Console()
    print_summary(console, recovery)
    if heads := _heads(recovery):
        table = Table("head", "norm of W", "rank of W", "norm of v", title=count_noun(len(heads), "head"))
        for number, head in enumerate(heads, start=1):
            table.add_row(str(number), *("–" if value is None else f"{value:.4g}" for value in head.values()))
        console.print(table)
    if (network := _network(recovery)) is not None:
        size = f"{count_noun(len(network), 'neuron')} on {count_noun(len(network.linear), 'input')}"
        console.print(Text(f"network: {size}, with the value matrices in them"))
    if out is not None:
        console.print(Text(f"wrote {out}. Keep it as private as the weights."))
    print_proof_and_cost(console, recovery)
    paid = f"{ledger.num_asked:,} asked, {ledger.num_paid:,} paid in this run, {len(ledger):,} in the ledger"
    console.print(Text(f"queries: {paid}{_for_each_unknown(recovery)}"))
    console.print(Text(f"no query can show: {_NEVER_TOLD}", style="dim"))
    console.print(Text(f"what stops it: {_WHAT_STOPS_IT}", style="dim"))


_NEVER_TOLD = (
    "the order of heads; whether heads with equal W are one head with the sum of their v; heads with v = 0; from signs "
    "alone, the norm of v; behind a network, v and the network apart from each other"
)
_WHAT_STOPS_IT = (
    "a bound on the norms of tokens (refuse longer ones, or scale them down before the layer); rounding and noise "
    "alone do not stop it: docs/queries.md"
)


def _for_each_unknown(recovery: Recovery[HeadWeights]) -> str:
    details = recovery.certificate.details
    if not details.get("degrees_of_freedom"):
        return ""
    each = details["learning_queries_per_degree_of_freedom"]
    return f"; {each:.2f} to learn each of {details['degrees_of_freedom']:,} degrees of freedom"


def _network(recovery: Recovery[Any]) -> ReluNetwork | None:
    """The network that was recovered, alone or behind heads."""
    from unmask.linalg.relu import ReluNetwork

    value = recovery.value
    network = value if isinstance(value, ReluNetwork) else getattr(value, "network", None)
    return network if recovery.status.conclusive else None


def _heads(recovery: Recovery[Any]) -> list[dict[str, float | None]]:
    """Norms and ranks; None where an entry is not known, as v is not where a network follows."""
    from torch.linalg import matrix_norm, matrix_rank, vector_norm

    # A singular value below what the certificate lets pass cannot be told from 0; signs pass all or nothing, yet
    # bisection leaves an error in W as well.
    rtol = max(recovery.certificate.tolerance, 1e-9)
    matrices = getattr(recovery.value, "W", ())
    values = getattr(recovery.value, "v", [None] * len(matrices))
    return [
        {
            "norm_W": finite(float(matrix_norm(W))),
            "rank_W": int(matrix_rank(W, rtol=rtol)) if recovery.certificate.holds and W.isfinite().all() else None,
            "norm_v": None if v is None else finite(float(vector_norm(v))),
        }
        for W, v in zip(matrices, values, strict=True)
    ]


def write_weights(recovery: Recovery[Any], oracle: str, path: Path) -> Path | None:
    """Tensors 'W' (heads, width, width) and 'v' (heads, width), whole or not at all; nothing if nothing is known.

    A network is 'normals' (neurons, inputs), 'signs' (neurons,) and 'linear' (inputs,), as in `ReluNetwork`.
    """
    from unmask.evidence.files import write

    heads = {name: getattr(recovery.value, name, None) for name in ("W", "v")}
    known: dict[str, Tensor] = {name: tensor for name, tensor in heads.items() if tensor is not None and len(tensor)}
    if (network := _network(recovery)) is not None:
        known |= {"normals": network.normals, "signs": network.signs, "linear": network.linear}
    if not known:
        return None
    header = {"status": recovery.status.name, "reason": recovery.reason, "oracle": oracle}
    return write(path, "weights", known, header)
