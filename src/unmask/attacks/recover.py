"""The three front doors, for texts, inputs and weights: each runs the attack that is named, or the one that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unmask.arguments import require_count, require_token_ids
from unmask.attacks.gradients.lora.attack import reads_adapters_alone
from unmask.attacks.gradients.pairs.attack import PairAttack
from unmask.attacks.outputs.layer_inputs.preimages import Preimages
from unmask.attacks.queries.claims import no_heads, refuse
from unmask.attacks.queries.fresh import fresh_sequences
from unmask.attacks.queries.many_heads.circle_heads import CircleHeadsAttack
from unmask.attacks.queries.many_heads.known_subspaces import KnownSubspacesAttack
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.many_heads.repetition import RepetitionAttack
from unmask.attacks.queries.many_heads.vector_heads import VectorHeadsAttack
from unmask.attacks.queries.networks.transformer import TransformerAttack, TransformerWeights
from unmask.attacks.queries.one_head.noisy_head import NoisyAttack
from unmask.attacks.queries.one_head.signs import MembershipAttack
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.attacks.queries.profile import OracleProfile, probe_oracle
from unmask.attacks.queries.query_run import QueryRun
from unmask.attacks.table import DEFAULT, Attack, Secret, parse_attack
from unmask.errors import InputError
from unmask.evidence.caches import CacheEvidence
from unmask.evidence.gradients import GradientEvidence
from unmask.evidence.ledger import BudgetSpent, Ledger
from unmask.evidence.oracles import Oracle, OracleEvidence
from unmask.evidence.outputs import AttentionEvidence, HiddenEvidence, Site
from unmask.evidence.samples import SampleEvidence
from unmask.evidence.stacks import AttentionStackEvidence
from unmask.evidence.vectors import VectorEvidence
from unmask.linalg.heads import HeadWeights
from unmask.linalg.relu import ReluNetwork
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.load import require_model
from unmask.models.pooling import prefix_tokens
from unmask.progress import Progress, shown_unless_watched, tell
from unmask.recovery import RecoveredTexts, Recovery, Status
from unmask.wording import count_noun

TextEvidence = GradientEvidence | HiddenEvidence | CacheEvidence | VectorEvidence
AttackChoice = str | Callable[..., Recovery[Any]] | None

_CHANNEL_OF = {
    GradientEvidence: "gradients",
    HiddenEvidence: "outputs",
    CacheEvidence: "caches",
    VectorEvidence: "vectors",
}
_STACK = "attention-stack"
_NUM_NEW = 4  # questions to a service whose answers were kept from an earlier run
_ADDED = 20  # times what the oracle adds to an answer
_TINY = 1e-12  # largest entry of states that were multiplied by something
_CHANGED = 0.1  # of an answer: another layer is off by the order of one


def recover_text(
    evidence: TextEvidence,
    model: Model | EncoderDecoder,
    *,
    attack: AttackChoice = None,
    known_beginning: str | Sequence[int] | None = None,
    progress: Progress | None = None,
    effort: int = 1,
    seed: int = 0,
) -> Recovery[RecoveredTexts]:
    """Recover the texts behind an update, hidden states, a cache or embeddings.

    The model must be the one that the client started from, or that the service runs; no other is taken. `attack`: a
    name of the table of attacks, with settings if it has any ('dager:rank_margin=0'), or an attack; by default the
    one that fits. `known_beginning`: what every text begins with, text or token ids (a chat template, a system
    prompt), where states or caches of decoders, or vectors, are read. `effort`: so many times as many attempts,
    while texts are missing, where updates of encoders, or vectors, are read. `progress` is told each step; by default
    steps are shown on standard error from the third second on (`silent`, or UNMASK_QUIET=1: never).
    """
    if isinstance(model, EncoderDecoder):
        return _recover_pairs(evidence, model, attack, progress, seed)
    require_model(model)
    require_count("effort", effort)
    channel = channel_of(evidence)
    if known_beginning is not None:
        evidence = _with_beginning(evidence, model, known_beginning)
    usual = choose_attack(evidence, model)
    secrets = Secret.TEXTS, Secret.TOKENS
    run = _choose(attack, usual, channel, *secrets, causal=model.causal, seed=seed, effort=effort)
    evidence, units = _in_larger_units(evidence)
    evidence.check(model)
    with shown_unless_watched(progress):
        found = run(evidence.to(model.device), as_client_ran_it(model, evidence.compute_dtype), tell)
    return replace(found, reason=units + _add_on_padding(found, evidence, model))


def _add_on_padding(found: Recovery[RecoveredTexts], evidence: TextEvidence, model: Model) -> str:
    """The reason, with what there is to say of texts that begin or end in the padding token where no mask says so."""
    if not isinstance(evidence, HiddenEvidence | CacheEvidence) or not bool(evidence.mask.all()):
        return found.reason
    texts = [text.tokens for text in found.value.texts if text.tokens]
    padded = [tokens for tokens in texts if model.pad_token in (tokens[0], tokens[-1])]
    if len(padded) in (0, len(texts)):
        return found.reason
    number, padding = count_noun(len(texts), "text"), model.decode([model.pad_token])
    return (
        f"{found.reason.removesuffix('.')}; {len(padded)} of {number} begin or end in {padding!r}, the padding token, "
        "and no place is marked as padding: if it is some, wrap again with the tokenizer's attention_mask "
        "(`unmask wrap … --mask`)"
    )


def channel_of(evidence: Any) -> str:
    """The channel that texts leak by."""
    if not isinstance(evidence, TextEvidence):
        raise InputError(
            f"texts can be recovered from gradients, hidden states, caches or vectors, got {type(evidence).__name__}; "
            "for one attention layer use recover_inputs"
        )
    return _CHANNEL_OF[type(evidence)]


def _in_larger_units(evidence: TextEvidence) -> tuple[TextEvidence, str]:
    """States and caches of numbers near zero, as clipping leaves them, times a power of two; and a sentence.

    Their squares would be lost in float32. What a common factor hides is found by the attacks.
    """
    if not isinstance(evidence, HiddenEvidence | CacheEvidence):
        return evidence, ""
    tensors = evidence.named_tensors()
    largest = max(float(tensor.abs().max()) for tensor in tensors.values())
    if not 0 < largest < _TINY:
        return evidence, ""
    power = -math.frexp(largest)[1]
    scaled = {name: (tensor.double() * 2.0**power).to(tensor) for name, tensor in tensors.items()}
    return evidence.with_tensors(scaled), f"what was seen is near zero and was multiplied by 2^{power} first: "


def _with_beginning(evidence: TextEvidence, model: Model, beginning: str | Sequence[int]) -> TextEvidence:
    """The evidence with the tokens that its texts begin with; a token that closes texts is left out."""
    if isinstance(evidence, VectorEvidence):
        prefix = prefix_tokens(model, beginning) if isinstance(beginning, str) else tuple(beginning)
        tokens = require_token_ids("known_beginning", prefix)
        return replace(evidence, recipe=replace(evidence.recipe, prefix=tokens))
    by_position = isinstance(evidence, CacheEvidence) or (
        isinstance(evidence, HiddenEvidence) and evidence.site in (Site.STREAM, Site.FINAL_NORM)
    )
    if isinstance(evidence, GradientEvidence) or not by_position or not model.causal:
        raise InputError("a known beginning helps where vectors, or states or a cache of a decoder are read")
    given = model.encode(beginning) if isinstance(beginning, str) else beginning
    frame = model.frame_tokens
    if isinstance(beginning, str) and frame is not None and list(given)[-1:] == [frame[1]]:
        given = given[:-1]
    return replace(evidence, known_beginning=require_token_ids("known_beginning", given))


def _recover_pairs(
    evidence: TextEvidence, model: EncoderDecoder, attack: AttackChoice, progress: Progress | None, seed: int
) -> Recovery[RecoveredTexts]:
    """Pairs of texts, from an update of an encoder–decoder."""
    if not isinstance(evidence, GradientEvidence):
        raise InputError("states are those of one side of an encoder–decoder: give model.encoder or model.decoder")
    if attack not in (None, DEFAULT, "pairs") and not callable(attack):
        raise InputError(f"an update of an encoder–decoder is read by the attack 'pairs', got {attack!r}")
    evidence.check(model)
    run = attack if callable(attack) else PairAttack(seed=seed)
    with shown_unless_watched(progress):
        return run(evidence.to(model.device), model, tell)


def choose_attack(evidence: TextEvidence, model: Model) -> str:
    """The name of the attack for this kind of evidence, site and model."""
    if isinstance(evidence, VectorEvidence):
        return "embedding"
    if isinstance(evidence, GradientEvidence):
        if model.causal:
            return "lora" if reads_adapters_alone(evidence, model) else "decoder"
        return "encoder"
    if isinstance(evidence, CacheEvidence):
        return "cache"
    if evidence.site is Site.ATTENTION:
        return "first-attention"
    if evidence.site is Site.MEAN:
        return "pooled"
    return "prompt" if model.causal else "encoder-prompt"


def as_client_ran_it(model: Model, compute_dtype: torch.dtype) -> Model:
    """The model with the weights that the client had, in a precision that distances can be measured in.

    A client in bfloat16 has rounded weights: they are rounded here too, then used in float32.
    """
    precise = torch.float64 if compute_dtype is torch.float64 else torch.float32
    for dtype in (compute_dtype, precise):
        model = model if model.dtype is dtype else model.to(dtype=dtype)
    return model


def recover_inputs(
    evidence: AttentionEvidence | AttentionStackEvidence,
    *,
    attack: AttackChoice = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Recovery[Preimages]:
    """All inputs X that a layer, or a stack of layers, may have had: softmax(scale·X W Xᵀ)·X·V = output.

    `recovery.value.X` is the first pre-image, `recovery.value.preimages` all that were found; the status is RECOVERED
    only if there is one, and no sign of another. `attack` as for texts; `seed` is that of the search's starts.
    """
    if not isinstance(evidence, AttentionEvidence | AttentionStackEvidence):
        raise InputError(
            "inputs of layers are recovered from AttentionEvidence or AttentionStackEvidence, got "
            f"{type(evidence).__name__}"
        )
    is_stack = isinstance(evidence, AttentionStackEvidence)
    if is_stack and not (attack in (None, DEFAULT) or callable(attack) or str(attack).startswith(_STACK)):
        raise InputError(f"a stack of layers is read by the attack '{_STACK}', got {attack!r}")
    run = _choose(attack, _STACK if is_stack else "attention", "inputs", Secret.INPUTS, seed=seed)
    with shown_unless_watched(progress):
        recovery: Recovery[Preimages] = run(evidence, tell)
    return recovery


def recover_weights(
    oracle: Oracle | SampleEvidence,
    *,
    width: int | None = None,
    ledger: str | Path | None = None,
    budget: int | None = None,
    max_norm: float | None = None,
    subspaces: Sequence[Any] | None = None,
    attack: AttackChoice = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Recovery[Any]:
    """The heads of an attention layer that may only be asked: `recovery.value.W` (H, d, d), `.v` (H, d).

    Of a one-layer transformer, heads with a ReLU network behind them, the value is `TransformerWeights`: `.W`, and
    `.network`, None where only the heads are known.

    `attack`: a name of the table of attacks, with settings if it has any ('low-rank:rank=4'), or an attack; by default
    the oracle is probed, and the one that fits its answers is run. `ledger` is a file that keeps every answer, so that
    a killed run goes on where it was and pays nothing twice; `budget` the number of answers that may be paid for;
    `max_norm` a bound on tokens, if one is known; `subspaces` (rank, width) rows for each head, if the adversary also
    knows that heads live in orthogonal subspaces, and in which (Prop. C.2: Σ (r² + r) queries then suffice).

    Instead of an oracle, `SampleEvidence` may be given: sequences that somebody else chose, and their answers.
    """
    if isinstance(oracle, SampleEvidence):
        chosen = _choose(attack, "samples", "queries", Secret.HEADS, seed=seed)
        with shown_unless_watched(progress):
            return chosen(oracle, tell)
    if width is None:
        raise InputError("width, the numbers of a token, must be given where an oracle is asked")
    if subspaces is not None:
        if attack not in (None, DEFAULT):
            raise InputError("subspaces and an attack were both given; leave one of them out")
        attack = KnownSubspacesAttack(subspaces=subspaces, seed=seed)
    book = Ledger(ledger, budget=budget, about=f"{oracle.name}, tokens of {width}")
    try:
        evidence = OracleEvidence(oracle, width, book, max_norm)
        return recover_from_answers(evidence, attack=attack, progress=progress, seed=seed)
    finally:
        book.close()


def recover_from_answers(
    evidence: OracleEvidence,
    *,
    profile: OracleProfile | None = None,
    attack: AttackChoice = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Recovery[Any]:
    """The same, of evidence; with a `profile` if the oracle was probed before.

    Signs go to bisection, vectors and numbers to gating and isolation. Where the answer to a token's negative is not
    the negative of its answer, no heads alone answer: a one-layer transformer is learned, heads with a network behind
    them. Where tokens may not be as long as these need, or heads turn on and off together, layers that answer with
    numbers are read by other means: a single head with averaged passes, several by the poles beside a circle of
    tokens, up to three by repeated tokens. Where the ledger was used before, a few new questions tell whether it is
    still the same layer.
    """
    with shown_unless_watched(progress):
        return _recover_from_answers(evidence, profile, attack, seed)


def _recover_from_answers(
    evidence: OracleEvidence, profile: OracleProfile | None, attack: AttackChoice, seed: int
) -> Recovery[Any]:
    before, is_resumed = evidence.ledger.num_asked - (profile.num_queries if profile else 0), evidence.ledger.was_used
    if attack not in (None, DEFAULT):
        chosen = _choose(attack, DEFAULT, "queries", Secret.HEADS, Secret.NETWORK, seed=seed)
        found: Recovery[Any] = chosen(evidence, tell)
        if is_resumed and found.status is Status.RECOVERED:
            found = _ask_again(evidence, probe_oracle(evidence, torch.Generator().manual_seed(seed)), found)
            found = replace(found, cost=replace(found.cost, queries=evidence.ledger.num_asked - before))
        return found
    run = QueryRun(seed, tell, evidence=evidence)
    try:
        profile = profile or probe_oracle(evidence, torch.Generator().manual_seed(seed))
    except BudgetSpent as ending:
        reason = f"The budget ended while the oracle was probed: {ending}."
        return refuse(run, Status.BUDGET_EXHAUSTED, reason)
    recovery = _ask_by_profile(evidence, profile, seed)
    if is_resumed and recovery.status is Status.RECOVERED:
        recovery = _ask_again(evidence, profile, recovery)
    cost = replace(recovery.cost, queries=evidence.ledger.num_asked - before)  # those of attacks that failed included
    return replace(recovery, cost=cost)


def _ask_by_profile(evidence: OracleEvidence, profile: OracleProfile, seed: int) -> Recovery[Any]:
    """The recovery of the attack that fits."""
    if profile.signs_only:
        return MembershipAttack(seed=seed)(evidence, tell)
    if profile.is_linear and not profile.is_odd:
        return _ask_for_network(evidence, profile, seed)
    if profile.num_outputs:
        return VectorHeadsAttack(seed=seed)(evidence, tell, profile)
    one_head = NoisyAttack(seed=seed) if profile.absolute_error else SingleHeadAttack(seed)
    if evidence.width == 1:
        return one_head(evidence, tell)
    recovery = MultiHeadAttack(seed=seed)(evidence, tell, profile)
    if recovery.status is not Status.NOTHING_FOUND:
        return recovery
    few = () if profile.max_norm == float("inf") else (one_head,)
    for attack in (*few, CircleHeadsAttack(seed=seed), *(RepetitionAttack(seed=seed) for _ in few)):
        recovery = attack(evidence, tell)
        if recovery.status.conclusive or recovery.status is Status.BUDGET_EXHAUSTED:
            break
    return recovery


def _ask_for_network(evidence: OracleEvidence, profile: OracleProfile, seed: int) -> Recovery[Any]:
    """One head with a network behind it, or several."""
    for many_heads in (False, True):
        recovery: Recovery[Any] = TransformerAttack(many_heads, seed=seed)(evidence, tell, profile)
        if recovery.status is not Status.NOTHING_FOUND:
            break
    return recovery if recovery.status.conclusive else replace(recovery, value=no_heads(evidence))


def _ask_again(evidence: OracleEvidence, profile: OracleProfile, recovery: Recovery[Any]) -> Recovery[Any]:
    """Ask a used ledger's service a few new questions: the answers that were kept may be those of another layer.

    Limits: tells nothing where what the oracle adds is larger than its answers, or where the budget has no room.
    """
    learned, generator = recovery.value, torch.Generator().manual_seed(len(evidence.ledger))
    if isinstance(learned, HeadWeights | TransformerWeights):
        heads = HeadWeights(learned.W, learned.v if isinstance(learned, HeadWeights) else learned.W[:, 0])
        new = fresh_sequences(heads, 1.0, min(profile.max_norm, 1e12), generator)[:_NUM_NEW]
    else:  # a network: tokens of norm one
        drawn = torch.randn(_NUM_NEW, 1, evidence.width, generator=generator, dtype=torch.float64).to(evidence.device)
        new = drawn / drawn.norm(dim=2, keepdim=True)
    try:
        answers = evidence.ask(new)
    except BudgetSpent:
        return recovery
    expected = learned(new[:, 0] if isinstance(learned, ReluNetwork) else new).to(answers)
    expected = expected.sign() if profile.signs_only else expected
    size = max(float(answers.square().mean().sqrt()), float(expected.square().mean().sqrt()))
    off = float((answers - expected).abs().max()) / size
    if off <= max(_CHANGED, 10 * recovery.certificate.tolerance, _ADDED * profile.absolute_error / size):
        return recovery
    reason = (
        f"The ledger holds the answers of another layer: {_NUM_NEW} new questions are answered otherwise now, by "
        f"{off:.1e} of an answer. Name another ledger."
    )
    return replace(recovery, value=no_heads(evidence), status=Status.NOTHING_FOUND, reason=reason)


def _choose(
    attack: AttackChoice, usual: str, channel: str, *secrets: Secret, causal: bool | None = None, **settings: Any
) -> Callable[..., Recovery[Any]]:
    """The attack that was named, or the `usual` one; `settings` where its text leaves them open."""
    if callable(attack):
        return attack
    if not isinstance(attack, str | None):
        raise InputError(f"attack must be a name or an attack, got {type(attack).__name__}; see `unmask attacks`")
    spec = parse_attack(DEFAULT if attack is None else attack, channel, *secrets) or Attack(usual)
    fault = None if causal is None else spec.find_model_fault(causal)
    if fault is not None:
        raise InputError(f"{fault}; see `unmask attacks`")
    made: Callable[..., Recovery[Any]] = spec.make(**settings)
    return made
