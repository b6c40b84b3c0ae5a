"""The table of attacks: what each needs, what it claims, where it must fail, and where it comes from.

The API (`recover_text(…, attack="dager")`), the commands (`--attack`, `unmask attacks`), the `attacks` of a plan, the
contract tests and the documentation read it. A new attack is a class in a file of its own, and one line here. Classes
are imported when they are used, so that the table itself costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from unmask.errors import InputError
from unmask.specs import REQUIRED, Setting, Spec, describe_settings, flag, number, one_of, split_text, whole_number
from unmask.wording import did_you_mean

DEFAULT = "default"  # the attack that fits the evidence


class Secret(Enum):
    """What an attack recovers."""

    TEXTS = "texts"
    TOKENS = "tokens"
    INPUTS = "inputs of a layer"
    HEADS = "attention heads"
    NETWORK = "a network"
    OUTPUT_LAYER = "an output layer"


@dataclass(frozen=True)
class AttackKind:
    """A line of the table.

    `needs` is the evidence, `works_on` the models or layers that it is for, `claims` what a RECOVERED or a certain part
    of it means, `limits` where it must fail, `source` the paper. A `is_baseline` attack is a paper's as published: it
    holds no gate.
    """

    path: str  # module:class, below unmask.attacks
    channel: str
    secret: Secret
    example: str
    needs: str
    works_on: str
    claims: str
    limits: str
    source: str
    is_baseline: bool = False

    @cached_property
    def make(self) -> Callable[..., Any]:
        """The class; its settings are what the text of an attack may give."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(f"unmask.attacks.{module}"), name)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The fields of the class that can be written as text."""
        return tuple(_settings_of(self.make))

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        return f"{self.secret.value} from {self.needs}"

    @property
    def usage(self) -> str:
        """How it is written."""
        return describe_settings(self.settings, self.example)

    def check(self, **settings: Any) -> None:
        """Refuse settings that the attack refuses."""
        self.make(**settings)


_UPDATE = "a client's update"
_STATES = "hidden states of all positions"
_LAYER = "W, V and the output of one attention layer"
_ANSWERS = "answers to sequences of vectors"
_DAGER = "DAGER, arXiv 2405.15586"
_UNMASKING = "arXiv 2310.12462"
_QUERIES = "arXiv 2601.16873"

# fmt: off
ATTACKS: Mapping[str, AttackKind] = {
    "decoder": AttackKind("gradients.decoder.attack:DecoderAttack", "gradients", Secret.TEXTS,
        "decoder", _UPDATE, "decoders",
        "the client, run again on the texts, sends this update",
        "fewer distinct prefixes than 3.6 × hidden size; where digits, noise or local steps blur the update, as "
        "'noisy'",
        f"ours, after {_DAGER}"),
    "noisy": AttackKind("gradients.noisy.attack:NoisyAttack", "gradients", Secret.TEXTS,
        "noisy", "a client's update with few digits, noise, or several local steps", "decoders",
        "the client, run again on the texts, sends this update up to its digits or its noise",
        "next-token training; noise that hides most directions of the first blocks' gradients; adaptive optimisers; "
        "else the bag of words, and texts as guesses", "ours"),
    "encoder": AttackKind("gradients.encoder.attack:EncoderAttack", "gradients", Secret.TEXTS,
        "encoder:effort=4", _UPDATE, "encoders",
        "the client, run again on the texts, sends this update",
        "fewer rows than the hidden size; clean updates of some SGD steps, or one step with few digits or weak noise; "
        "else the bag of words, and texts as guesses", f"ours, after {_DAGER}"),
    "lora": AttackKind("gradients.lora.attack:LoraAttack", "gradients", Secret.TEXTS,
        "lora", "the gradients of low-rank adapters", "decoders",
        "the client, run again on the texts, sends this update",
        "clean gradients of one step, and adapters that have been trained before (B is not zero); up to about half as "
        "many different prefixes as the width; else the bag of words", "ours"),
    "pairs": AttackKind("gradients.pairs.attack:PairAttack", "gradients", Secret.TEXTS,
        "pairs", _UPDATE, "encoder-decoders",
        "the client, run again on the pairs, sends this update",
        "clean gradients of one step; of an encoder without learned positions (T5) the tokens alone, and then texts of "
        "the decoder are guesses", f"ours, after {_DAGER}"),
    "bag-of-words": AttackKind("gradients.bag_of_words.attack:BagOfWordsAttack", "gradients", Secret.TOKENS,
        "bag-of-words", _UPDATE, "decoders and encoders",
        "every token listed occurs in the batch; under noise with a stated number of false ones",
        "the order of tokens is not tried",
        f"{_DAGER}, Algorithm 1; rows of embeddings and the test under noise are ours"),
    "dager": AttackKind("baselines.dager:Dager", "gradients", Secret.TEXTS,
        "dager:rank_margin=20", "the query gradients of the first two blocks", "decoders and encoders",
        "sequences within the paper's tolerances",
        "thresholds are set by hand, so that very little noise stops it; encoders by products of tokens",
        f"{_DAGER}, Algorithms 1 to 3", is_baseline=True),
    "prompt": AttackKind("outputs.prompts.attack:PromptAttack", "outputs", Secret.TEXTS,
        "prompt:max_candidates=512", _STATES, "decoders",
        "the forward pass of the text gives these states",
        "a first token that noise hides ends the reading", "ours; SipIt, arXiv 2510.15511, reads the same states"),
    "cache": AttackKind("outputs.caches.attack:CacheAttack", "caches", Secret.TEXTS,
        "cache:max_candidates=512", "keys and values that one block caches", "decoders",
        "the forward pass of the text gives these keys and values",
        "a page of a deeper block needs the tokens before it", "ours; arXiv 2508.09442 reads caches by collision"),
    "encoder-prompt": AttackKind("outputs.prompts.encoder_attack:EncoderPromptAttack", "outputs", Secret.TEXTS,
        "encoder-prompt", _STATES, "encoders",
        "the forward pass of the text gives these states",
        "added noise leaves guesses", "ours"),
    "first-attention": AttackKind("outputs.first_attention.attack:FirstAttentionAttack", "outputs", Secret.TEXTS,
        "first-attention", "the output of the first attention module", "decoders and encoders",
        "the module gives this output for the text, and for no other token at any position",
        "the first block only", f"ours, for the layer of {_UNMASKING}"),
    "pooled": AttackKind("outputs.vectors.pooled:PooledAttack", "outputs", Secret.TOKENS,
        "pooled", "the mean of a text's states", "decoders and encoders",
        "the bag of words gives this mean",
        "exact at the embeddings only; guesses deeper", "ours"),
    "embedding": AttackKind("outputs.vectors.attack:EmbeddingAttack", "vectors", Secret.TEXTS,
        "embedding:max_attempts=2", "sentence embeddings", "decoders and encoders",
        "the vector of the text, computed again, is the one stored, and that of no neighbour is",
        "texts of up to about 16 tokens, and some longer ones; noise and secret rotations leave guesses", "ours"),
    "known-texts": AttackKind("outputs.vectors.known_texts:KnownTextsAttack", "vectors", Secret.TEXTS,
        "known-texts:file=texts.txt", "vectors, last states or rows of logits, and texts to look for",
        "decoders and encoders",
        "the vector of the text, computed again, is the one stored, and that of no neighbour is",
        "finds texts of the file alone", "ours"),
    "stack": AttackKind("outputs.layer_inputs.stack:StackAttack", "outputs", Secret.TEXTS,
        "stack", _STATES, "decoders",
        "each block's equation is solved row by row, and the text gives these states",
        "errors grow with every block; few blocks", f"ours, after {_UNMASKING}, Thm 1.3"),
    "attention": AttackKind("outputs.layer_inputs.attack:AttentionAttack", "inputs", Secret.INPUTS,
        "attention:num_starts=160", _LAYER, "one bare attention layer",
        "the only input known to give this output; uniqueness is searched, seldom proved",
        "an indefinite W beyond 8 tokens of unknown norms; outputs with noise, where V is square, have an input too",
        f"ours, for the problem of {_UNMASKING}"),
    "attention-stack": AttackKind("outputs.layer_inputs.attention_stack:AttentionStackAttack", "inputs", Secret.INPUTS,
        "attention-stack:max_chains=16", "W and V of each layer and the last one's output", "bare attention layers",
        "the only chain known to give this output; errors of all layers are in its radius",
        "those of 'attention' at each layer", f"ours, after {_UNMASKING}, Thm 1.3"),
    "attention-newton": AttackKind("baselines.attention_newton:PaperNewton", "inputs", Secret.INPUTS,
        "attention-newton:gamma=0.1", _LAYER, "one bare attention layer",
        "nothing: where Newton's method ended",
        "the paper's regularisation swamps the data; without it the start decides",
        f"{_UNMASKING}, Thm 1.3", is_baseline=True),
    "single-head": AttackKind("queries.one_head.single_head:SingleHeadAttack", "queries", Secret.HEADS,
        "single-head", _ANSWERS, "one head",
        "fresh sequences are answered as the learned head answers",
        "v = 0 leaves W open", f"{_QUERIES}, Thm 4.1; probes are ours"),
    "noisy-head": AttackKind("queries.one_head.noisy_head:NoisyAttack", "queries", Secret.HEADS,
        "noisy-head:passes=16", "noisy or rounded answers", "one head",
        "W up to the error that the spread of passes tells",
        "errors that are the same in every pass", f"{_QUERIES}, Thm 6.1; passes are ours"),
    "signs": AttackKind("queries.one_head.signs:MembershipAttack", "queries", Secret.HEADS,
        "signs:bits=40", "signs of answers", "one head",
        "W, and v up to its length",
        "token norms must be free", f"{_QUERIES}, Thm B.1; bisection of v is ours"),
    "low-rank": AttackKind("queries.one_head.low_rank:LowRankAttack", "queries", Secret.HEADS,
        "low-rank:rank=4", _ANSWERS, "one head of low rank",
        "fresh sequences are answered as the learned head answers",
        "a rank near the width gains nothing", f"{_QUERIES}, Thm 5.1; adaptive queries are ours"),
    "many-heads": AttackKind("queries.many_heads.multi_head:MultiHeadAttack", "queries", Secret.HEADS,
        "many-heads:polish=true", _ANSWERS, "any number of heads up to the width",
        "fresh sequences are answered as the learned heads answer",
        "tokens must be as long as turning heads off takes", "ours"),
    "vector-heads": AttackKind("queries.many_heads.vector_heads:VectorHeadsAttack", "queries", Secret.HEADS,
        "vector-heads", "answers that are vectors", "any number of heads up to the width",
        "fresh sequences are answered as the learned heads answer",
        "tokens must be as long as turning heads off takes", "ours"),
    "circle-heads": AttackKind("queries.many_heads.circle_heads:CircleHeadsAttack", "queries", Secret.HEADS,
        "circle-heads:passes=2", _ANSWERS, "several heads behind a bound on token norms",
        "fresh sequences are answered as the learned heads answer",
        "scores must reach about 5 within the bound; each head costs digits, so that noise limits their number",
        "ours"),
    "repeated-tokens": AttackKind("queries.many_heads.repetition:RepetitionAttack", "queries", Secret.HEADS,
        "repeated-tokens:max_heads=2", "answers to repeated tokens", "up to three heads behind a bound on token norms",
        "fresh sequences are answered as the learned heads answer",
        "each head costs 1.7 decades of conditioning", "after arXiv 2608.03294"),
    "orthogonal-heads": AttackKind("queries.many_heads.orthogonal_heads:OrthogonalHeadsAttack", "queries", Secret.HEADS,
        "orthogonal-heads", _ANSWERS, "heads that read orthogonal subspaces",
        "fresh sequences are answered as the learned heads answer",
        "subspaces must be orthogonal between heads", f"{_QUERIES}, App. C"),
    "known-subspaces": AttackKind("queries.many_heads.known_subspaces:KnownSubspacesAttack", "queries", Secret.HEADS,
        "known-subspaces:file=subspaces.safetensors", f"{_ANSWERS}, and the heads' subspaces",
        "heads in orthogonal subspaces",
        "fresh sequences are answered as the learned heads answer",
        "subspaces must be known and orthogonal, and hold all that a head reads",
        f"{_QUERIES}, Prop. C.2"),
    "samples": AttackKind("queries.samples:SamplesAttack", "queries", Secret.HEADS,
        "samples:max_heads=2", "sequences that somebody else chose, with their answers", "one head or a few",
        "samples that were held out are answered as the learned heads answer",
        "about two samples for each weight; scores that saturate lead to local minima",
        "ours"),
    "unit-probes": AttackKind("baselines.query_papers:PaperSingleHeadAttack", "queries", Secret.HEADS,
        "unit-probes:probes=basis", _ANSWERS, "one head",
        "fresh sequences are answered as the learned head answers",
        "digits are lost to the smallest entry of v; what saturates is lost",
        f"{_QUERIES}, Thm 4.1", is_baseline=True),
    "nuclear-norm": AttackKind("baselines.query_papers:NuclearNormAttack", "queries", Secret.HEADS,
        "nuclear-norm:num_measurements=100", _ANSWERS, "one head of low rank",
        "fresh sequences are answered as the learned head answers",
        "about 2.5 times as many queries as weights",
        f"{_QUERIES}, Thm 5.1", is_baseline=True),
    "relu-network": AttackKind("queries.networks.relu_network:ReluNetworkAttack", "queries", Secret.NETWORK,
        "relu-network:biases=true", "answers to single vectors", "a two-layer ReLU network",
        "fresh inputs are answered as the learned network answers",
        "neurons' kinks come as close as 1/m²",
        f"{_QUERIES}, §4.1; the learner is ours, after arXiv 2003.04884"),
    "transformer": AttackKind("queries.networks.transformer:TransformerAttack", "queries", Secret.NETWORK,
        "transformer:many_heads=true", _ANSWERS, "one attention layer and a ReLU network behind it",
        "fresh sequences are answered as the learned transformer answers",
        "biases in the network are refused",
        f"{_QUERIES}, §4.1; homogeneity and routing are ours"),
    "output-layer": AttackKind("queries.output_layer.attack:OutputLayerAttack", "queries", Secret.OUTPUT_LAYER,
        "output-layer", "logits or log-probabilities of a language model", "any language model",
        "the hidden size, and the output layer up to a linear map; fresh prompts agree",
        "noise above the weakest direction leaves 'at least'",
        "Carlini et al., arXiv 2403.06634; Finlayson et al., arXiv 2403.09539"),
}
# fmt: on


class Attack(Spec):
    """An attack with its settings, by name; `make()` gives the object that is called with evidence."""

    noun: ClassVar[str] = "attack"
    table: ClassVar[Mapping[str, Any]] = ATTACKS

    @property
    def kind(self) -> AttackKind:  # type: ignore[override]
        """Its line of the table."""
        return ATTACKS[self.name]

    def make(self, **settings: Any) -> Any:
        """The attack; `settings` (a seed) are used where its text leaves them open and its class has them."""
        known = {each.name for each in self.kind.settings}
        usual = {name: value for name, value in settings.items() if name in known and name not in self.written}
        return self.kind.make(**{**self.given, **usual})

    def find_model_fault(self, causal: bool) -> str | None:
        """Why it is not for a decoder, or for an encoder; None if it is."""
        if {"decoders": causal, "encoders": not causal, "encoder-decoders": False}.get(self.kind.works_on, True):
            return None
        model = "a decoder" if causal else "an encoder"
        return f"the attack '{self.name}' is for {self.kind.works_on}, and the model is {model}"


def parse_attack(text: str, channel: str, *secrets: Secret) -> Attack | None:
    """The attack on a channel that a text names, which must recover one of these; None for 'default'."""
    known = attacks_of(channel, *secrets)
    name, _ = split_text(text)
    if name in known:
        return Attack.parse(text)
    if text == DEFAULT:
        return None
    kind = ATTACKS.get(name)
    other = f"'{name}' recovers {kind.summary}" if kind else f"there is no attack '{name}'"
    raise InputError(f"{other}.{did_you_mean(name, [DEFAULT, *known])} Choose one of {DEFAULT}, {', '.join(known)}")


def attacks_of(channel: str, *secrets: Secret) -> list[str]:
    """Names of the attacks on a channel that recover one of these."""
    return [name for name, kind in ATTACKS.items() if kind.channel == channel and kind.secret in secrets]


# Whole numbers that may be 0; all others are counts of something that must be there.
_FROM_ZERO = frozenset({"seed", "rank_margin", "start_token", "max_linearisations", "max_settling"})


def _settings_of(attack: Callable[..., Any]) -> Iterator[Setting]:
    """Numbers, flags and words among the fields of an attack; what else it takes has no text."""
    kinds = get_type_hints(attack)
    for field in dataclasses.fields(attack):  # type: ignore[arg-type]
        if not field.init:
            continue
        default = REQUIRED if field.default is dataclasses.MISSING else field.default
        parts = [part for part in get_args(kinds[field.name]) if part is not type(None)] or [kinds[field.name]]
        if get_origin(kinds[field.name]) is Literal:
            yield one_of(field.name, get_args(kinds[field.name]), default=default)
        elif parts == [bool]:
            yield flag(field.name, default=default)
        elif parts == [int]:
            least = 0 if field.name in _FROM_ZERO else 1
            yield whole_number(field.name, least, 2**63 - 1, default=default)
        elif parts == [float]:
            yield number(field.name, "a number from 0 on", lambda x: 0 <= x < math.inf, default=default)
        elif parts == [str]:
            yield Setting(field.name, "a name", str, default=default)
