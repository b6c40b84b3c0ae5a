"""For every attack of the table: evidence that it reads, what a right answer is, and evidence that says nothing.

A new attack gets a recipe here. An attack has more than one where it takes other ways on other evidence; families,
tasks and sites are sampled so that each occurs with each attack that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from outputs.newton_matrices import GaussNewton
from tests.attacks.outputs.attention_layers import gaussian, random_layer, random_stack
from tests.attacks.queries.random_heads import random_head, rounded
from tests.attacks.queries.random_networks import random_layers, random_transformer
from tests.contracts import controls
from tests.contracts.models import make_model, stranger
from tests.contracts.replay import ABOUT, pack
from tests.contracts.watched import Answering, WatchedEvidence, WatchedLogits, WatchedOracle
from tests.tiny_models import VOCAB, WIDTH
from torch import Tensor

from unmask.attacks.table import ATTACKS
from unmask.evidence import AttentionEvidence, AttentionStackEvidence, GradientEvidence, HiddenEvidence
from unmask.evidence.ledger import Ledger
from unmask.evidence.logits import FunctionLogitOracle, LogitEvidence
from unmask.evidence.oracles import question_keys
from unmask.evidence.samples import SampleEvidence
from unmask.linalg.heads import HeadWeights
from unmask.models import Model
from unmask.progress import Progress, silent, tell, watched_by
from unmask.protocols import observe_cache, observe_gradients, observe_hidden, observe_lora, observe_vectors
from unmask.recovery import Recovery, Status
from unmask.scores.weights import score_heads, score_up_to_linear_map

WHOLE, PART, NOTHING = Status.RECOVERED, Status.PARTIAL, Status.NOTHING_FOUND


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """An attack by its name in the table, with settings, and how it must end on this recipe's evidence."""

    name: str
    on: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: Status = WHOLE

    def __str__(self) -> str:
        return f"{self.name}, {self.on}"

    @property
    def attack(self) -> Any:
        return ATTACKS[self.name].make(**self.settings)

    def run(self, evidence: Any, progress: Progress = silent, **settings: Any) -> Recovery[Any]:
        """What the attack makes of evidence; `settings` come before the recipe's."""
        with watched_by(progress):
            return replace(self.attack, **settings)(evidence, progress=tell)

    def observe(self, path: Path | None = None) -> Any:
        """Evidence, the same each time; answers are kept in a ledger at `path`, if they are answers."""
        raise NotImplementedError

    def tensors(self, evidence: Any) -> Mapping[str, Tensor]:
        """What the adversary reads, by name; answers are asked for."""
        raise NotImplementedError

    def job(self, evidence: Any, path: Path) -> dict[str, Any]:
        """What a fresh process needs besides the settings; evidence that is tensors is written to `path`."""
        return {"attack": pack(self.attack), "path": str(evidence.save(path))}

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        """Everything that a recovery claims and the secret does not hold. The auditor's side: this sees the secret."""
        raise NotImplementedError

    def is_found(self, recovery: Recovery[Any]) -> bool:
        """Whether everything that this recipe gives away was found."""
        raise NotImplementedError

    def controls(self) -> Iterator[tuple[str, Any]]:
        """Evidence whose signal was destroyed, and how."""
        raise NotImplementedError

    def is_silent(self, recovery: Recovery[Any], control: str) -> bool:
        """Whether nothing is claimed of evidence that says nothing."""
        return not recovery.status.conclusive and not recovery.certificate.holds


# ---- texts, from updates and from states

# Different lengths, a repeated token, two texts with a common beginning.
BATCH = ((5, 17, 99, 17, 250), (400, 3, 8, 21), (44, 45, 46, 47, 48, 49, 50, 51), (400, 3, 8, 9, 11))
PROMPTS = (*BATCH[:2], BATCH[3])  # a search over tokens takes long for each
START, END = 1, 2
FRAME = (START, END)
STARTED = tuple((START, *text) for text in BATCH)
FRAMED = ((START, 17, 99, 250, END), (START, 400, 3, 8, 21, END))
SHORT = ((17, 99, 17), (400, 3))


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts(Recipe):
    """`seen` is the task whose gradients are seen, or the site and the layer whose states are.

    `keep`: parts of parameter names; all others are left out of the update.
    """

    model_name: str
    seen: str | tuple[str, int]
    texts: tuple[tuple[int, ...], ...] | tuple[str, ...] = BATCH
    keep: tuple[str, ...] | None = None

    @property
    def model(self) -> Model:
        return make_model(self.model_name)

    @property
    def secret(self) -> list[tuple[int, ...]]:
        return [tuple(self.model.encode(text) if isinstance(text, str) else text) for text in self.texts]

    @property
    def secret_tokens(self) -> set[int]:
        return {token for text in self.secret for token in text}

    @property
    def input_tokens(self) -> set[int]:
        """Without the last token of a text that is learned token by token: it is a label only."""
        return {token for text in self.secret for token in text[: -1 if self.seen == NEXT else None]}

    def run(self, evidence: Any, progress: Progress = silent, **settings: Any) -> Recovery[Any]:
        with watched_by(progress):
            return replace(self.attack, **settings)(evidence, self.model, tell)

    def observe(self, path: Path | None = None) -> Any:
        return self.observe_on(self.model)

    def observe_on(self, model: Model) -> Any:
        """What the adversary sees of a client that starts from `model`, or of a service that runs it."""
        if isinstance(self.seen, tuple):
            return observe_hidden(model, list(self.texts), site=self.seen[0], layer=self.seen[1])
        keep = None if self.keep is None else list(self.keep)
        return observe_gradients(model, list(self.texts), task=self.seen, parameters=keep)

    def tensors(self, evidence: GradientEvidence | HiddenEvidence) -> Mapping[str, Tensor]:
        return evidence.gradients if isinstance(evidence, GradientEvidence) else {"states": evidence.states}

    def with_tensors(self, evidence: Any, tensors: Mapping[str, Tensor]) -> Any:
        """The same evidence with other tensors in it."""
        if isinstance(evidence, GradientEvidence):
            return replace(evidence, gradients=tensors)
        return replace(evidence, states=tensors["states"])

    def job(self, evidence: Any, path: Path) -> dict[str, Any]:
        return super().job(evidence, path) | {"model": self.model_name}

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        secret = Counter(self.secret)
        certain = Counter({text.tokens: text.count for text in recovery.value.certain})
        yield from (f"a certain text that is not in the batch: {tokens}" for tokens in certain - secret)
        if recovery.status is Status.RECOVERED and Counter(recovery.value.expand()) != secret:
            yield f"'{recovery.status.value}' with {recovery.value.expand()}"
        if recovery.certificate.holds and not recovery.value.token_set <= self.secret_tokens:
            yield f"{len(recovery.value.token_set - self.secret_tokens)} false tokens, and the certificate holds"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        """The texts, or else every token of them."""
        if recovery.status is Status.RECOVERED:
            return Counter(recovery.value.expand()) == Counter(self.secret)
        return recovery.value.token_set == self.input_tokens

    def controls(self) -> Iterator[tuple[str, Any]]:
        evidence = self.observe()
        tensors = self.tensors(evidence)
        yield "noise", self.with_tensors(evidence, controls.noise_of_the_same_norm(tensors, seed=3))
        if isinstance(evidence, GradientEvidence):
            yield "noise of a low rank", self.with_tensors(evidence, controls.noise_of_a_low_rank(tensors, seed=3))
        yield "shuffled entries", self.with_tensors(evidence, controls.shuffle_entries(tensors, seed=3))
        yield (
            "another model's",
            self.with_tensors(evidence, self.tensors(self.observe_on(stranger(self.model, seed=3)))),
        )

    def is_silent(self, recovery: Recovery[Any], control: str) -> bool:
        """Shuffled rows and another model's update may still tell tokens, if they are true (`faults`)."""
        silent_about_tokens = not recovery.certificate.holds and not (
            recovery.status.conclusive and recovery.value.token_set
        )
        return not recovery.value.certain and (silent_about_tokens or not control.startswith("noise"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapters(Texts):
    """A client that sends gradients of its adapters alone, which were trained on other texts before."""

    def observe_on(self, model: Model) -> Any:
        earlier = [[60, 61, 62, 63], [70, 71, 72]]
        return observe_lora(model, list(self.texts), task=self.seen, steps=2, earlier_texts=earlier)


@dataclass(frozen=True, kw_only=True, eq=False)
class Vectors(Texts):
    """A store that keeps one vector a text; `seen` is the pooling."""

    def observe_on(self, model: Model) -> Any:
        return observe_vectors(model, list(self.texts), pooling=self.seen)

    def tensors(self, evidence: Any) -> Mapping[str, Tensor]:
        return {"vectors": evidence.vectors}

    def with_tensors(self, evidence: Any, tensors: Mapping[str, Tensor]) -> Any:
        return replace(evidence, vectors=tensors["vectors"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches(Texts):
    """Keys and values that a block keeps, in a storage type; `seen` is ('cache', the block)."""

    storage: str = "float32"

    def observe_on(self, model: Model) -> Any:
        return observe_cache(model, list(self.texts), layer=self.seen[1], dtype=self.storage)

    def tensors(self, evidence: Any) -> Mapping[str, Tensor]:
        return evidence.parts

    def with_tensors(self, evidence: Any, tensors: Mapping[str, Tensor]) -> Any:
        return replace(evidence, keys=tensors.get("keys"), values=tensors.get("values"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs(Texts):
    """Pairs of a text that is read and one that is written."""

    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def secret(self) -> list[tuple[int, ...]]:
        return [text for pair in self.pairs for text in pair]

    def observe_on(self, model: Any) -> Any:
        return observe_gradients(model, list(self.pairs))


# ---- the input of one attention layer


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerInput(Recipe):
    """A layer of 4 tokens of width 8; sym(W) is definite, so that an attack which ends with one input can be right."""

    seed: int = 0
    causal: bool = False

    def observe(self, path: Path | None = None) -> AttentionEvidence:
        return self._layer()[0]

    def _layer(self, value_width: int = 8) -> tuple[AttentionEvidence, Tensor]:
        return random_layer("pd", 4, 8, seed=self.seed, causal=self.causal, e=value_width)

    def tensors(self, evidence: AttentionEvidence) -> Mapping[str, Tensor]:
        return {"W": evidence.W, "V": evidence.V, "output": evidence.output}

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        if recovery.status.conclusive and not self.is_found(recovery):
            yield f"'{recovery.status.value}' with another input"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        X = self._layer()[1]
        return float((recovery.value.X - X).norm() / X.norm()) < 1e-8  # rounding, times the layer's condition number

    def controls(self) -> Iterator[tuple[str, AttentionEvidence]]:
        """With more outputs than inputs (V is wide) most outputs are no layer's output at all, and noise is none."""
        evidence, _ = self._layer(value_width=12)
        output = {"output": evidence.output}
        for seed in range(2):
            yield f"noise {seed}", replace(evidence, **controls.noise_of_the_same_norm(output, seed))
        yield "shuffled entries", replace(evidence, **controls.shuffle_entries(output, seed=3))
        other, _ = random_layer("pd", 4, 8, seed=self.seed + 100, causal=self.causal, e=12)
        yield "another layer's", replace(evidence, output=other.output)


@dataclass(frozen=True, kw_only=True, eq=False)
class StackInput(Recipe):
    """Three definite layers of 3 tokens of width 12; they are sharp, so that three of them leave digits."""

    def observe(self, path: Path | None = None) -> AttentionStackEvidence:
        return self._stack()[0]

    def _stack(self, value_width: int = 12) -> tuple[AttentionStackEvidence, Tensor]:
        return random_stack("pd", 3, 12, 3, 3.0, e=value_width)

    def tensors(self, evidence: AttentionStackEvidence) -> Mapping[str, Tensor]:
        weights = {
            f"layers.{index}.{name}": getattr(layer, name)
            for index, layer in enumerate(evidence.layers)
            for name in "WV"
        }
        return {**weights, "output": evidence.output}

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        if recovery.status.conclusive and not self.is_found(recovery):
            yield f"'{recovery.status.value}' with another input"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        X = self._stack()[1]
        return float((recovery.value.X - X).norm() / X.norm()) < 1e-8  # rounding, times the layers' condition numbers

    def controls(self) -> Iterator[tuple[str, AttentionStackEvidence]]:
        """The last V is wide, so that noise is no output of the stack."""
        evidence, _ = self._stack(value_width=16)
        output = {"output": evidence.output}
        yield "noise", replace(evidence, **controls.noise_of_the_same_norm(output, 0))
        yield "shuffled entries", replace(evidence, **controls.shuffle_entries(output, seed=3))


# ---- weights, from answers


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights(Recipe):
    """A layer, and what its oracle does to the layer's answers (`after`) before it hands them out."""

    layer: Answering
    width: int
    after: Answering = field(default=lambda answers: answers)
    max_norm: float | None = None

    def answer(self, sequences: Tensor) -> Tensor:
        return self.after(self.layer(sequences))

    def observe(self, path: Path | None = None, *, budget: int | None = None) -> WatchedEvidence:
        return self.behind(self.answer, Ledger(path, about=ABOUT, budget=budget))

    def behind(self, answer: Answering, ledger: Ledger | None = None) -> WatchedEvidence:
        """Evidence that this function answers for."""
        book = Ledger(about=ABOUT) if ledger is None else ledger
        return WatchedEvidence(WatchedOracle(answer), self.width, book, self.max_norm)  # type: ignore[arg-type]

    def tensors(self, evidence: WatchedEvidence) -> Mapping[str, Tensor]:
        return {"answers": torch.zeros(0)}

    def job(self, evidence: WatchedEvidence, path: Path) -> dict[str, Any]:
        about = {"ledger of": "answers", "width": self.width, "max_norm": self.max_norm}
        return {"attack": pack(self.attack), "path": str(path)} | about

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        """Of one head: what is not known is NaN, and what is not NaN is the layer's."""
        if isinstance(self.layer, HeadWeights) and len(self.layer) == len(recovery.value) == 1:
            known = recovery.value.W.isfinite()
            # The noisiest recipe, four decimals and tokens of bounded norm, is off by 1e-3.
            if not torch.allclose(recovery.value.W[known], self.layer.W[known], atol=1e-2):
                yield "entries of W that are not the layer's"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        """Heads by their score; what stands behind heads by the layer's answers to fresh sequences."""
        if isinstance(self.layer, HeadWeights):
            return score_heads(recovery.value, self.layer).W_error < 1e-2
        if getattr(recovery.value, "network", recovery.value) is None:
            return False
        X = torch.randn(32, 3, self.width, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        learned, own = recovery.value(X[:, 0] if self.name == "relu-network" else X), self.layer(X)
        return float((learned - own).norm() / own.norm()) < 1e-6

    @property
    def size(self) -> Tensor:
        """The root mean square of answers to random tokens, with as many numbers as an answer has."""
        X = torch.randn(64, 2, self.width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return self.layer(X).square().mean(0).sqrt()

    def controls(self) -> Iterator[tuple[str, WatchedEvidence]]:
        """Answers by chance, answers without a law, and those of other questions."""
        chance, law = controls.answer_by_chance(self.size), controls.answer_by_hash(self.size)
        generator = torch.Generator().manual_seed(4)
        yield "answers by chance", self.behind(lambda X: self.after(chance(question_keys(X))))
        yield "answers by hash", self.behind(lambda X: self.after(law(question_keys(X))))
        yield "answers of others", self.behind(lambda X: self.answer(X)[torch.randperm(len(X), generator=generator)])

    def is_silent(self, recovery: Recovery[Any], control: str) -> bool:
        return super().is_silent(recovery, control) and claims_no_part(recovery.value)


def claims_no_part(value: Any) -> bool:
    """Whether a value claims no head and no neuron."""
    W, network = getattr(value, "W", ()), getattr(value, "network", None)
    return len(W) == 0 and not network and (hasattr(value, "W") or len(value) == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples(Recipe):
    """Sequences that nobody chose, and a head's answers to them."""

    width: int = 5

    @property
    def layer(self) -> HeadWeights:
        return random_head(self.width)

    def observe(self, path: Path | None = None) -> SampleEvidence:
        X = torch.randn(140, 4, self.width, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        return SampleEvidence(X, self.layer(X))

    def tensors(self, evidence: SampleEvidence) -> Mapping[str, Tensor]:
        """Sequences are what was asked, and no secret."""
        return {"answers": evidence.answers}

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        if recovery.status.conclusive and not self.is_found(recovery):
            yield f"'{recovery.status.value}' with another head"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        return score_heads(recovery.value, self.layer).W_error < 1e-8

    def controls(self) -> Iterator[tuple[str, SampleEvidence]]:
        evidence = self.observe()
        answers = {"answers": evidence.answers}
        yield "noise", replace(evidence, **controls.noise_of_the_same_norm(answers, seed=3))
        yield "shuffled entries", replace(evidence, **controls.shuffle_entries(answers, seed=3))

    def is_silent(self, recovery: Recovery[Any], control: str) -> bool:
        return super().is_silent(recovery, control) and claims_no_part(recovery.value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Logits(Recipe):
    """A language model whose service shows all logits, or log-probabilities of the `top` likeliest tokens."""

    top: int | None = None

    @torch.no_grad()
    def answer(self, prompts: Tensor) -> Tensor:
        return make_model("tiny_llama").hf(input_ids=prompts).logits[:, -1]

    def observe(self, path: Path | None = None, *, budget: int | None = None) -> WatchedLogits:
        return self.behind(self.answer, Ledger(path, about=ABOUT, budget=budget))

    def behind(self, answer: Answering, ledger: Ledger | None = None) -> WatchedLogits:
        """Evidence that this function answers for."""
        oracle = FunctionLogitOracle(answer, VOCAB, ABOUT, self.top)
        return WatchedLogits(oracle, Ledger(about=ABOUT) if ledger is None else ledger)

    def tensors(self, evidence: LogitEvidence) -> Mapping[str, Tensor]:
        return {"logits": torch.zeros(0)}

    def job(self, evidence: LogitEvidence, path: Path) -> dict[str, Any]:
        about = {"ledger of": "logits", "vocab_size": VOCAB, "view": asdict(evidence.oracle.view)}
        return {"attack": pack(self.attack), "path": str(path)} | about

    def faults(self, recovery: Recovery[Any]) -> Iterator[str]:
        if recovery.value.at_least > WIDTH or recovery.value.hidden_size not in (None, WIDTH):
            yield f"a hidden size of {recovery.value.hidden_size}, at least {recovery.value.at_least}"

    def is_found(self, recovery: Recovery[Any]) -> bool:
        if recovery.value.hidden_size != WIDTH:
            return False
        W = make_model("tiny_llama").unembedding.detach().double()[recovery.value.tokens]
        return score_up_to_linear_map(recovery.value.W, W - W.mean(0)) < 1e-4  # float32; a random W scores 0.5

    def controls(self) -> Iterator[tuple[str, WatchedLogits]]:
        """Not those of other prompts: they span the same space."""
        size = torch.ones(VOCAB, dtype=torch.float64)
        chance, law = controls.answer_by_chance(size), controls.answer_by_hash(size)
        generator = torch.Generator().manual_seed(4)

        def shuffle(prompts: Tensor) -> Tensor:
            logits = self.answer(prompts)
            return logits.gather(1, torch.rand(logits.shape, generator=generator).argsort(1))

        yield "answers by chance", self.behind(lambda prompts: chance(question_keys(prompts[:, None])))
        yield "answers by hash", self.behind(lambda prompts: law(question_keys(prompts[:, None])))
        yield "logits of other tokens", self.behind(shuffle)

    def is_silent(self, recovery: Recovery[Any], control: str) -> bool:
        """Logits by hash are no noise: they span all dimensions, so that a bound is true of them, and a size is not."""
        if control == "answers by hash":
            return recovery.value.hidden_size is None
        return super().is_silent(recovery, control) and recovery.value.at_least == 0


# ---- the recipes

NEXT, CLASS, STREAM = "next_token", "classification", "stream"
GPT2, LLAMA, BERT = "tiny_gpt2", "tiny_llama", "tiny_bert"
# Block 0 without the embeddings, so that tokens must come from a span.
SPAN_OF_GPT2, SPAN_OF_BERT, BLOCK_0_OF_BERT = ("h.0.",), ("encoder.layer.0.attention.self",), ("encoder.layer.0.",)


def texts(name: str, on: str, model_name: str, seen: Any, batch: Any = BATCH, **more: Any) -> Texts:
    """A recipe for texts; what is not a field of it is a setting of the attack."""
    fields = {key: more.pop(key) for key in ("status", "keep") if key in more}
    return Texts(name=name, on=on, model_name=model_name, seen=seen, texts=batch, settings=more, **fields)


def heads(name: str, layer: HeadWeights, on: str = "heads", **more: Any) -> Weights:
    """A recipe for heads."""
    fields = {key: more.pop(key) for key in ("after", "max_norm") if key in more}
    return Weights(name=name, on=on, layer=layer, width=layer.v.shape[1], settings=more, **fields)


def network(name: str, on: str, layer: Answering, **more: Any) -> Weights:
    """A recipe for a network of width 5."""
    return Weights(name=name, on=on, layer=layer, width=5, settings=more)


def vector_heads() -> HeadWeights:
    return HeadWeights(W=random_head(6, num_heads=2).W, v=gaussian(1, 2, 6, 3))


def orthogonal_heads() -> HeadWeights:
    """Two heads of three coordinates each, as in Assumption C.1."""
    pair, mask = random_head(6, num_heads=2), torch.zeros(2, 6, dtype=torch.float64)
    mask[0, :3] = mask[1, 3:] = 1
    return HeadWeights(W=pair.W * mask[:, :, None] * mask[:, None], v=pair.v * mask)


_UNIT = tuple(tuple(float(i == j) for j in range(6)) for i in range(6))  # of which these heads take three each

RECIPES: tuple[Recipe, ...] = (
    texts("decoder", "gpt2, next token", GPT2, NEXT),
    texts("decoder", "gpt2, block 0 alone", GPT2, NEXT, status=PART, keep=SPAN_OF_GPT2),
    texts("decoder", "llama, classification", LLAMA, CLASS),
    texts("noisy", "llama, next token", LLAMA, NEXT, status=PART),
    texts("encoder", "bert", BERT, CLASS, FRAMED, frame=FRAME),
    texts("encoder", "bert, block 0 alone", BERT, CLASS, FRAMED, frame=FRAME, keep=BLOCK_0_OF_BERT),
    texts("encoder", "bert, span", BERT, CLASS, FRAMED, frame=FRAME, status=PART, keep=SPAN_OF_BERT),
    Adapters(name="lora", on="llama", model_name=LLAMA, seen=NEXT),
    Pairs(
        name="pairs",
        on="bart",
        model_name="tiny_bart",
        seen=NEXT,
        settings={"frame": FRAME},
        pairs=tuple(zip(FRAMED, ((START, 44, 45, END), (START, 46, 47, 48, END)), strict=True)),
    ),
    texts("bag-of-words", "gpt2, span", GPT2, NEXT, status=PART, keep=SPAN_OF_GPT2),
    texts("bag-of-words", "bert, rows", BERT, CLASS, status=PART),
    texts("bag-of-words", "bert, span", BERT, CLASS, status=PART, keep=SPAN_OF_BERT),
    texts("dager", "gpt2, next token", GPT2, NEXT, status=PART),
    texts("dager", "llama, classification", LLAMA, CLASS, STARTED, start_token=START),
    texts("dager", "bert", BERT, CLASS, FRAMED, start_token=START, end_tokens=(END,)),
    texts("prompt", "gpt2, embeddings", GPT2, (STREAM, 0), PROMPTS, status=PART),
    texts("prompt", "gpt2, last layer", GPT2, (STREAM, 3), PROMPTS),
    texts("prompt", "llama, final norm", LLAMA, ("final_norm", 3), PROMPTS),
    Caches(name="cache", on="llama", model_name=LLAMA, seen=("cache", 1), texts=PROMPTS),
    Caches(name="cache", on="gpt2, int8", model_name=GPT2, seen=("cache", 2), texts=PROMPTS, storage="int8"),
    texts("encoder-prompt", "bert", BERT, (STREAM, 1), FRAMED, max_texts=400),
    texts("first-attention", "gpt2", GPT2, ("attention", 0), PROMPTS),
    texts("first-attention", "llama", LLAMA, ("attention", 0), PROMPTS),
    texts("first-attention", "bert", BERT, ("attention", 0)),
    texts("pooled", "llama", LLAMA, ("mean", 0), BATCH[:1], status=PART),
    Vectors(
        name="embedding",
        on="bert",
        model_name=BERT,
        seen="mean",
        texts=SHORT,
        settings={"max_texts": 700, "max_attempts": 1},
    ),
    Vectors(
        name="known-texts",
        on="llama",
        model_name=LLAMA,
        seen="last",
        texts=SHORT,
        settings={"texts": tuple(map(tuple, (*SHORT, *BATCH)))},
    ),
    texts("stack", "gpt2", GPT2, (STREAM, 1), ((17, 99),)),
    *(LayerInput(name="attention", on=f"layer {seed}", seed=seed) for seed in range(2)),
    LayerInput(name="attention", on="causal layer", causal=True),
    StackInput(name="attention-stack", on="three layers"),
    LayerInput(name="attention-newton", on="layer", status=NOTHING),
    LayerInput(
        name="attention-newton",
        on="layer, Gauss-Newton",
        status=PART,
        settings={"matrix": GaussNewton(), "line_search": True},
    ),
    heads("single-head", random_head(6)),
    heads("noisy-head", random_head(6), passes=4, after=rounded(4), max_norm=7.0),
    heads("signs", random_head(5), bits=30, after=torch.sign),
    heads("low-rank", random_head(8, rank=2)),
    heads("many-heads", random_head(6, num_heads=3)),
    heads("vector-heads", vector_heads()),
    heads("circle-heads", random_head(5, num_heads=2), max_norm=10.0),
    heads("repeated-tokens", random_head(4, num_heads=2), max_norm=10.0),
    heads("orthogonal-heads", orthogonal_heads()),
    heads("known-subspaces", orthogonal_heads(), subspaces=(_UNIT[:3], _UNIT[3:])),
    Samples(name="samples", on="one head"),
    heads("unit-probes", random_head(6)),
    heads("nuclear-norm", random_head(8, rank=1), num_measurements=40),
    network("relu-network", "network", lambda X: random_layers(5, 6)(X[:, 0])),
    network("transformer", "one head", random_transformer(1, 5, random_layers(5, 4))),
    network("transformer", "two heads", random_transformer(2, 5, random_layers(5, 4)), many_heads=True),
    Logits(name="output-layer", on="all logits", settings={"max_prompts": 160}),
    Logits(name="output-layer", on="the top 20", settings={"max_prompts": 160}, top=20),
)
