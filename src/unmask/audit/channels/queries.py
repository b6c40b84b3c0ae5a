"""Weights, a service that answers with them behind defences, and the weights that its answers give away."""

from __future__ import annotations

import math
from typing import Any

import torch

from unmask.attacks.recover import recover_weights
from unmask.attacks.table import Attack, Secret, parse_attack
from unmask.audit.cases.case import Case
from unmask.audit.cases.secrets import QuerySecret, parse_secret
from unmask.audit.channels.axes import DEFAULT, NO_DEFENCE, SEEDS, Axis, attack_axis, list_of_defences, read_name
from unmask.audit.channels.channel_audit import ChannelAudit, Spec, WorkerContext
from unmask.audit.findings.finding import Finding
from unmask.audit.findings.result import finding_of
from unmask.defences.oracles import (
    ORACLE_DEFENCES,
    LogitFunction,
    OracleDefence,
    RateLimited,
    defend_logits,
    parse_oracle_defence,
)
from unmask.errors import InputError
from unmask.evidence.logits import FunctionLogitOracle, LogitEvidence
from unmask.evidence.oracles import FunctionOracle, Oracle
from unmask.linalg.heads import HeadWeights, canonical_heads
from unmask.models.adapter import Model
from unmask.models.heads import layer_heads
from unmask.models.outline import Outline
from unmask.progress import tell
from unmask.recovery import Certificate, Cost, Recovery, Status
from unmask.scores.weights import score_heads, score_up_to_linear_map

_FOUND = 0.1  # relative error of W up to which a head, or an output layer, counts as found; a guess has about 1
_TOKENS_PER_WIDTH = 1.7  # tokens whose logits are read, for each dimension: more than the width by a margin
_PROMPTS_PER_WIDTH = 2.7


def audit_queries(case: Case, context: WorkerContext) -> Finding:
    """Weights, a service that answers with them, and the weights that its answers give away."""
    model = context.model(case["model"]) if case["model"] else None
    recovery, scores = interrogate(case, model)
    return finding_of(case, model, recovery, scores)


def find_fault(spec: Spec) -> str | None:
    """What does not go together in a case."""
    if parse_secret(spec["secret"]).needs_a_model and not spec["model"]:
        return f"the secret '{spec['secret']}' is part of a model; write models = [\"smollm2-135m\"]"
    defences = {parse_oracle_defence(text).name: text for text in spec["defences"]}
    is_logits = spec["secret"] == "output-layer"
    if spec["attack"] != DEFAULT and is_logits != (Attack.parse(spec["attack"]).kind.secret is Secret.OUTPUT_LAYER):
        return f"the attack '{spec['attack']}' is not one for '{spec['secret']}'"
    kinds = {name: ORACLE_DEFENCES[name] for name in defences}
    has_meaning = {n: k.changes_logits if is_logits else not k.needs_vectors for n, k in kinds.items()}
    if idle := [text for name, text in defences.items() if not has_meaning[name]]:
        return f"the defence '{idle[0]}' has no meaning for the answers of '{spec['secret']}'"
    return None


def find_model_fault(spec: Spec, model: Outline) -> str | None:
    """A secret that the model does not have."""
    try:
        secret = parse_secret(spec["secret"])
    except InputError as error:
        return str(error)
    if secret.name == "output-layer" and not model.has_language_head:
        return f"'{spec['model']}' predicts no tokens, so it has no output layer to hide"
    if secret.settings.get("layer", 0) >= model.num_blocks:
        return (
            f"'{spec['model']}' has no layer '{secret}'; its {model.num_blocks} blocks are 0 to {model.num_blocks - 1}"
        )
    return None


def interrogate(case: Case, model: Model | None) -> tuple[Recovery[Any], dict[str, Any]]:
    """Ask the service of a case until its weights are known or cannot be."""
    secret = parse_secret(case["secret"])
    defences = [_of_this_case(parse_oracle_defence(text), case) for text in case["defences"]]
    if secret.name == "output-layer":
        assert model is not None  # plans without a model are refused
        return _output_layer(case, model, defences)
    heads = _secret_heads(secret, model, case["seed"])
    # Where waiting cuts batches, rows are computed one by one: the last digits must not depend on the clock.
    is_cut = any(defence.name == "rate" for defence in defences)
    oracle: Oracle = FunctionOracle(heads, str(secret), max_batch=1 if is_cut else None)
    for defence in defences:
        oracle = defence(oracle)
    try:
        width, seed = heads.v.shape[1], case["seed"]
        recovery = recover_weights(oracle, width=width, attack=case["attack"], seed=seed)
    except RateLimited:
        return _refuse("the service's limit on queries ended the attack"), _scores(0, 1.0, 0)
    true = canonical_heads(heads)
    learned = recovery.value if isinstance(recovery.value, HeadWeights) else true.select(torch.arange(len(true)) < 0)
    score = score_heads(learned, heads)
    each = [score_heads(learned, true.select(torch.arange(len(true)) == head)).W_error for head in range(len(true))]
    num_found = sum(error <= _FOUND for error in each)
    return recovery, _scores(num_found, min(score.W_error, 1.0), score.num_extra)


def _refuse(why: str) -> Recovery[Any]:
    """What an attack has whose questions were cut off: nothing, and nothing is known."""
    return Recovery(None, Status.BUDGET_EXHAUSTED, why, Certificate.none("nothing is claimed"), Cost())


def _of_this_case(defence: OracleDefence, case: Case) -> OracleDefence:
    """Noise without a seed of its own draws by the case's, so that no two cases have the same."""
    if defence.name != "noise" or defence.settings["seed"]:
        return defence
    return OracleDefence(defence.name, {**defence.settings, "seed": case.seed})


def _secret_heads(secret: QuerySecret, model: Model | None, seed: int) -> HeadWeights:
    """Heads that answer with one number: a layer of the model read out along a random direction, or random ones."""
    generator = torch.Generator().manual_seed(seed)
    if secret.name == "random":
        heads, width = secret.settings["heads"], secret.settings["width"]
        rows = torch.randn(heads, width + 1, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        return HeadWeights(W=rows[:, 1:], v=rows[:, 0])
    assert model is not None  # plans without a model are refused
    if secret.settings["layer"] >= model.num_blocks:
        raise InputError(f"the secret '{secret}' is no part of the model: it has {model.num_blocks} blocks, from 0 on")
    layer = layer_heads(model, secret.settings["layer"]).cpu()
    readout = torch.randn(layer.v.shape[2], generator=generator, dtype=torch.float64)
    return HeadWeights(W=layer.W, v=layer.v @ (readout / readout.norm()))


def _output_layer(case: Case, model: Model, defences: list[OracleDefence]) -> tuple[Recovery[Any], dict[str, Any]]:
    """A language model's service that shows logits."""
    unembedding = model.unembedding
    if unembedding is None:
        raise InputError(f"this {model.family} model predicts no tokens, so it has no output layer to hide")

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.hf(tokens.to(model.device)).logits[:, -1].cpu()

    shown: LogitFunction = logits
    for defence in defences:
        shown = defend_logits(shown, defence)
    num_tokens = min(unembedding.shape[0], max(64, int(_TOKENS_PER_WIDTH * model.width)))
    fitting = {"num_tokens": num_tokens, "max_prompts": max(256, int(_PROMPTS_PER_WIDTH * model.width))}
    run = (parse_attack(case["attack"], "queries", Secret.OUTPUT_LAYER) or Attack("output-layer")).make(
        **fitting, seed=case["seed"]
    )
    recovery = run(LogitEvidence(FunctionLogitOracle(shown, unembedding.shape[0], "logits")), tell)
    found = recovery.value
    known = min(found.at_least or 0, model.width) / model.width
    if found.hidden_size is None:
        return recovery, _scores(0, 1.0, 0, hidden_size_found=0, hidden_size_share=known)
    guess = math.sqrt(max(0.0, 1 - model.width / len(found.tokens)))  # of any matrix of that size, on average
    W = unembedding.detach().double().cpu()[found.tokens.cpu()]
    right = found.hidden_size == model.width
    error = min(1.0, score_up_to_linear_map(found.W, W - W.mean(0))) if right else 1.0
    size = {"hidden_size_found": int(right), "hidden_size_share": known}
    scores = _scores(int(error <= _FOUND), error, int(not right), **size)
    scores["chance"].update(weights_rate=1 - guess, weight_error=guess)
    return recovery, scores


def _scores(num_found: int, error: float, num_false: int, **size: float) -> dict[str, Any]:
    """Metrics, beside those of somebody who answers 0 for every weight; `size` are those of an output layer's."""
    metrics: dict[str, float] = {
        "weights_found": num_found,
        "weights_rate": 1 - error,
        "weight_error": error,
        "false_weights": num_false,
        **size,
    }
    chance = {
        "weights_found": 0,
        "weights_rate": 0.0,
        "weight_error": 1.0,
        "false_weights": 0,
        **dict.fromkeys(size, 0),
    }
    return {"metrics": metrics, "chance": chance}


QUERIES = ChannelAudit(
    axes={
        "models": Axis("model", lambda value: value if value == "" else read_name(value), ("",)),
        "secrets": Axis("secret", lambda value: str(parse_secret(read_name(value)))),
        "defences": Axis("defences", list_of_defences(parse_oracle_defence), (NO_DEFENCE,)),
        "attacks": Axis("attack", attack_axis("queries", Secret.HEADS, Secret.OUTPUT_LAYER), (DEFAULT,)),
        "seeds": SEEDS,
    },
    run=audit_queries,
    find_fault=find_fault,
    find_model_fault=find_model_fault,
)
