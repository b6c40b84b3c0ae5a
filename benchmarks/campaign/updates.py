"""One client's update from start to end: made as a recipe says, attacked, and judged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import unmask
from campaign.claims import false_claims, num_found
from campaign.models import ModelRecipe, build, simpler_models
from campaign.outcome import Outcome, ShortRepr, attack_again
from unmask.defences import secure_aggregate
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models import Model
from unmask.protocols.batch import Batch, is_pair, make_batch
from unmask.protocols.masking import mask_tokens
from unmask.protocols.table import parse_protocol

Text = tuple[Any, ...]  # tokens, or a pair of tuples of tokens


@dataclass(frozen=True, repr=False)
class UpdateRecipe(ShortRepr):
    """How an update is made.

    `masked` are (text, position) whose label is −100. `split` are the sizes of groups of texts whose means are added:
    by `clients` whose sum the server sees, or by hand as micro-batches. `optimizer` None is FedSGD, else FedAvg with
    `steps`. `keep` are parts of the names of tensors that are sent (all, if empty); `forget` is side knowledge that
    the adversary is not told. `protocol` is a client of the table of protocols, as a plan would name it, whose adapters
    were trained before on `earlier`; it stands for optimizer, steps and rate. `kind` only names the batch.
    """

    model: ModelRecipe
    texts: tuple[Text, ...]
    kind: str = "plain"
    task: str = "next_token"
    pooling: str | None = None
    padding: str = "right"
    max_length: int | None = None
    masked: tuple[tuple[int, int], ...] = ()
    split: tuple[int, ...] = ()
    clients: bool = False
    optimizer: str | None = None
    steps: int = 1
    learning_rate: float | None = None
    batch_size: int | None = None
    dtype: str = "float32"
    defences: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    protocol: str = ""
    earlier: tuple[Text, ...] = ()
    seed: int = 0

    @property
    def batch(self) -> list[tuple[int, ...]]:
        """The secret: the texts as tokens, cut where the client cuts them."""
        batch = _padded(self, build(self.model))
        return [tuple(row[mask].tolist()) for row, mask in zip(batch.tokens, batch.mask, strict=True)]

    @property
    def is_plain(self) -> bool:
        """Whether nothing stands in the way of the attack."""
        plain = UpdateRecipe(self.model, self.texts, self.kind, self.task, self.pooling, seed=self.seed)
        return replace(self, padding="right") == plain


def observe(recipe: UpdateRecipe, model: Model | None = None) -> tuple[Model, GradientEvidence]:
    """The model, unless it is given, and what the server sees."""
    model = model or client_model(recipe.model, recipe.dtype)
    if recipe.masked or (recipe.split and not recipe.clients):
        evidence = _by_hand(model, recipe)
    elif recipe.clients:
        groups = _groups(recipe)
        evidence = secure_aggregate([_observe(model, recipe, group, recipe.seed + at) for at, group in groups])
    else:
        evidence = _observe(model, recipe, recipe.texts, recipe.seed)
    if recipe.keep:
        evidence = evidence.only(*recipe.keep)
    generator = torch.Generator().manual_seed(recipe.seed)
    evidence = defend(evidence, recipe, generator)
    return model, replace(evidence, **dict.fromkeys(recipe.forget))


def defend(evidence: GradientEvidence, recipe: UpdateRecipe, generator: torch.Generator) -> GradientEvidence:
    """What the recipe's defences make of an update."""
    for text in recipe.defences:
        evidence = unmask.parse_defence(text)(evidence, generator)
    return evidence


@lru_cache(maxsize=12)
def client_model(recipe: ModelRecipe, dtype: str) -> Model:
    """The model in the client's precision."""
    model = build(recipe)
    return model if dtype == "float32" else model.to(dtype=getattr(torch, dtype))


def run(recipe: UpdateRecipe) -> Outcome:
    """Observe, attack, judge."""
    try:
        model, evidence = observe(recipe)
    except unmask.UnmaskError as error:
        return Outcome("not_made", recipe.kind, refusal=str(error))
    try:
        return judge(recipe, model, unmask.recover_text(evidence, model))
    except unmask.UnmaskError as error:
        return Outcome("refused", recipe.kind, refusal=str(error))


def judge(recipe: UpdateRecipe, model: Model, recovery: Any) -> Outcome:
    """The claims of a recovery against the batch."""
    batch = recipe.batch
    faults = false_claims(recovery, batch, seen_tokens(recipe, model), recipe.model.equal)
    return Outcome(
        recovery.status.name, recipe.kind, tuple(faults), len(batch), num_found(recovery, batch), recipe.is_plain
    )


def seen_tokens(recipe: UpdateRecipe, model: Model) -> set[int]:
    """Tokens that the model saw besides those of the texts: padding, masks and what replaced a masked token."""
    seen = {model.pad_token} if len({len(text) for text in recipe.batch}) > 1 else set()
    if recipe.task == Task.MASKED_TOKEN.value:
        masked, _ = mask_tokens(model, _padded(recipe, model), 0.15, torch.Generator().manual_seed(recipe.seed))
        seen |= set(masked.tokens.flatten().tolist())
    return seen


def simpler(recipe: UpdateRecipe) -> Iterator[UpdateRecipe]:
    """Recipes with less in them: fewer options, fewer texts, shorter texts, a smaller model."""
    plain: dict[str, Any] = {"defences": (), "keep": (), "forget": (), "max_length": None, "dtype": "float32"}
    plain |= {"padding": "right", "masked": (), "split": (), "clients": False, "steps": 1, "batch_size": None}
    for name, value in plain.items():
        if getattr(recipe, name) != value:
            yield replace(recipe, **{name: value})
    if recipe.optimizer:
        yield replace(recipe, optimizer=None, learning_rate=None, batch_size=None, steps=1)
    if recipe.protocol:
        yield replace(recipe, protocol="", earlier=())
    for name in ("defences", "keep", "forget", "masked"):
        several = getattr(recipe, name)
        yield from (replace(recipe, **{name: several[:at] + several[at + 1 :]}) for at in range(len(several)))
    if not recipe.split or len(recipe.split) < len(recipe.texts):
        yield from (_without_text(recipe, at) for at in range(len(recipe.texts)) if len(recipe.texts) > 1)
    yield from (replace(recipe, model=model) for model in simpler_models(recipe.model))
    for at, text in enumerate(recipe.texts):
        is_framed = recipe.model.family not in ("gpt2", "llama", "mistral", "qwen2")
        places = range(1, len(text) - 1) if is_framed else reversed(range(len(text)))
        for place in places if len(text) > 1 and not is_pair(text) else ():
            yield _without_token(recipe, at, place)


def reproduce(recipe: UpdateRecipe) -> str:
    """A few lines of Python that show the failure."""
    return attack_again(
        recipe,
        "judge(recipe, model, recovery).faults",
        "from campaign.updates import ModelRecipe, UpdateRecipe, judge, observe",
    )


def _observe(model: Model, recipe: UpdateRecipe, texts: Any, seed: int) -> GradientEvidence:
    """What one client sends."""
    data: dict[str, Any] = {"task": recipe.task, "padding_side": recipe.padding, "max_length": recipe.max_length}
    if recipe.pooling:
        data["pooling"] = recipe.pooling
    if recipe.protocol:
        trained = {"earlier_texts": list(recipe.earlier)} if recipe.earlier else {}
        return parse_protocol(recipe.protocol)(model, list(texts), seed=seed, **trained, **data).evidence
    if recipe.optimizer is None:
        return unmask.observe_gradients(model, list(texts), seed=seed, **data)
    return unmask.observe_fedavg(
        model,
        list(texts),
        local_steps=recipe.steps,
        optimizer=recipe.optimizer,
        learning_rate=recipe.learning_rate,
        batch_size=recipe.batch_size,
        seed=seed,
        **data,
    )


def _padded(recipe: UpdateRecipe, model: Model) -> Batch:
    """The texts as the client pads and cuts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that texts were cut is what the recipe says
        return make_batch(model, recipe.texts, padding_side=recipe.padding, max_length=recipe.max_length)  # type: ignore[arg-type]


def _by_hand(model: Model, recipe: UpdateRecipe) -> GradientEvidence:
    """Gradients as somebody's own training loop makes them: labels of −100, micro-batches whose means are added."""
    batch = _padded(recipe, model)
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    starts = batch.mask.int().argmax(1).tolist()
    for text, position in recipe.masked:
        labels[text, starts[text] + position] = -100
    parameters = dict(model.hf.named_parameters())
    with torch.enable_grad():
        loss = torch.zeros(())
        for start, group in _groups(recipe):
            rows = slice(start, start + len(group))
            loss = loss + model.hf(**batch.part(rows.start, rows.stop).inputs, labels=labels[rows]).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    tensors = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    options = {"task": Task.NEXT_TOKEN, "num_texts": len(recipe.texts), "compute_dtype": model.dtype}
    return GradientEvidence.of(model, tensors, update=Update.GRADIENT, **options)


def _groups(recipe: UpdateRecipe) -> list[tuple[int, tuple[Text, ...]]]:
    """Where each group of the split starts, and its texts; all texts are one group where nothing is split."""
    groups, start = [], 0
    for size in recipe.split or (len(recipe.texts),):
        if recipe.texts[start : start + size]:
            groups.append((start, recipe.texts[start : start + size]))
        start += size
    return groups


def _without_text(recipe: UpdateRecipe, at: int) -> UpdateRecipe:
    masked = tuple((text - (text > at), position) for text, position in recipe.masked if text != at)
    split = list(recipe.split)
    for group, start in enumerate(sum(split[:group]) for group in range(len(split))):
        if start <= at < start + split[group]:
            split[group] -= 1
            break
    texts = recipe.texts[:at] + recipe.texts[at + 1 :]
    return replace(recipe, texts=texts, masked=masked, split=tuple(size for size in split if size))


def _without_token(recipe: UpdateRecipe, at: int, place: int) -> UpdateRecipe:
    masked = tuple(
        (text, position - (text == at and position > place))
        for text, position in recipe.masked
        if (text, position) != (at, place)
    )
    text = recipe.texts[at][:place] + recipe.texts[at][place + 1 :]
    return replace(recipe, texts=(*recipe.texts[:at], text, *recipe.texts[at + 1 :]), masked=masked)
