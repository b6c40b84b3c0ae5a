"""DP-SGD: every text's gradient is clipped, the sum is noised, the mean is sent. Opacus does all three.

g̃ = (Σᵢ gᵢ·min(1, C/‖gᵢ‖) + N(0, σ²C²·I)) / B

Notation: gᵢ the gradient of text i's own mean loss over all trained parameters (a fresh head's included), C the
clipping norm, σ the noise multiplier, B the number of texts. So each entry of what is shared carries noise of standard
deviation σ·C/B, which the protocol makes public.

Opacus hooks onto layers. Its own rules cover nn.Linear, nn.Embedding and nn.LayerNorm; for transformers' RMSNorm and
Conv1D it falls back to functorch, layer by layer; a weight that is tied to the embedding is summed over both uses
before its norm is taken. So nothing of the supported families has to be frozen, except parameters that the loss never
sees (BERT's pooler under another pooling), which Opacus refuses. The hooks see only modules in training mode, so layers
with parameters are put into it, and dropout stays as `train_mode` says.

Limits: an embedding's `padding_idx` is not respected, so the row of a padding token that occurs in a text moves too.
The budget holds for Poisson sampling; the texts given are one such sample, taken to be of the expected size.
Cost: memory of one gradient for each text at once (0.5 GiB for SmolLM2-135M), beside the sum and the noise.
Source: Abadi et al., Deep Learning with Differential Privacy, 1607.00133, algorithm 1; Mironov et al., 1908.10530.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack

import torch

from unmask.arguments import require_count, require_number
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.protocols.batch import Batch, Texts
from unmask.protocols.client import Client, DataOptions, fix_seed


@dataclass(frozen=True)
class PrivateUpdate:
    """What the server sees, and the (ε, δ) that the client's whole training spends on it."""

    evidence: GradientEvidence
    epsilon: float
    delta: float


def observe_dpsgd(
    model: Model,
    texts: Texts,
    *,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
    sample_rate: float | None = None,
    dataset_size: int | None = None,
    steps: int = 1,
    delta: float = 1e-5,
    texts_at_once: int = 1,
    train_mode: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
    **data: Unpack[DataOptions],
) -> PrivateUpdate:
    """One step of a private client on `texts`, and the budget of a training of `steps` such steps.

    Each text is in the batch with probability `sample_rate`, or len(texts)/`dataset_size`; if neither is given, the
    batch is the whole data set and nothing is gained from sampling. `texts_at_once` trades memory for batched passes
    and changes nothing else. `data` are the options of `observe_gradients`, except that next-token losses are averaged
    over each text's own tokens, as clipping by text demands.
    """
    check_dpsgd(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=sample_rate,
        dataset_size=dataset_size,
        steps=steps,
        delta=delta,
    )
    require_count("texts_at_once", texts_at_once)
    epsilon = epsilon_spent(noise_multiplier, _rate(sample_rate, dataset_size, len(texts)), steps, delta)
    client = Client(model, texts, seed=seed, **data)
    shared, known = client.shared_parameters(parameters), client.side_knowledge()
    with fix_seed(seed), warnings.catch_warnings():
        # Embeddings have no inputs that need gradients, of which torch warns at every step.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        try:
            _noisy_mean(client, noise_multiplier, max_grad_norm, texts_at_once, train_mode, seed)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise InputError(
                f"Opacus cannot compute the gradient of each text for a model of kind '{model.family}': {reason}"
            ) from error
    evidence = GradientEvidence(
        gradients={name: p.grad.detach().clone() for name, p in shared.items() if p.grad is not None},
        model_fingerprint=model.fingerprint(),
        task=client.task,
        num_texts=len(texts),
        compute_dtype=model.dtype,
        noise_std=noise_multiplier * max_grad_norm / len(texts),
        **known,
    )
    return PrivateUpdate(evidence, epsilon, delta)


def check_dpsgd(
    *,
    noise_multiplier: float = 1.0,
    max_grad_norm: float = 1.0,
    sample_rate: float | None = None,
    dataset_size: int | None = None,
    steps: int = 1,
    delta: float = 1e-5,
) -> None:
    """Refuse settings that do not go together, before anything is computed."""
    require_number("max_grad_norm", max_grad_norm, positive=True)
    _check_mechanism(noise_multiplier, 1.0 if sample_rate is None else sample_rate, steps, delta)
    require_count("dataset_size", dataset_size)
    if sample_rate is not None and dataset_size is not None:
        raise InputError("sample_rate and dataset_size say the same thing, and both were given; leave one out")


def epsilon_spent(noise_multiplier: float, sample_rate: float, steps: int = 1, delta: float = 1e-5) -> float:
    """ε of `steps` subsampled Gaussian mechanisms, by Opacus's accountant of Rényi divergences; ∞ without noise."""
    _check_mechanism(noise_multiplier, sample_rate, steps, delta)
    accountant = _opacus().accountant()
    if noise_multiplier == 0:
        return math.inf
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    # Opacus tries orders from 1.1 to 63; beyond them lie the tightest bounds of very little and of very much noise.
    orders = [
        *(1 + 2.0**-power for power in range(10, 3, -1)),
        *accountant.DEFAULT_ALPHAS,
        *(2**p for p in range(6, 13)),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")  # a bound all the same
        return float(accountant.get_epsilon(delta, alphas=orders))


def _noisy_mean(
    client: Client, noise_multiplier: float, max_grad_norm: float, at_once: int, train_mode: bool, seed: int
) -> None:
    """Leave the noisy mean of the clipped gradients in each parameter's `grad`."""
    opacus = _opacus()
    batch = client.batch(client.rows)
    client.train(train_mode)
    _freeze_unseen(client, batch)
    trainable = [parameter for parameter in client.parameters() if parameter.requires_grad]
    for module in client.modules():
        module.training = train_mode or any(True for _ in module.parameters(recurse=False))
    hooks = opacus.hooks(client, loss_reduction="sum")
    private = opacus.optimizer(
        torch.optim.SGD(trainable, lr=1.0),  # never stepped: what it would descend along is what is sent
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=len(batch.tokens),
        generator=torch.Generator(client.model.device).manual_seed(seed),
    )
    starts = range(0, len(batch.tokens), at_once)
    for start in starts:
        rows = range(start, min(start + at_once, len(batch.tokens)))
        part = batch.part(rows.start, rows.stop)
        client(part, rows).of_each_text().sum().backward()
        is_last = start == starts[-1]
        private.signal_skip_step(not is_last)
        private.pre_step()
        if not is_last:
            private.zero_grad()
    hooks.remove_hooks()


def _freeze_unseen(client: Client, batch: Batch) -> None:
    """Freeze what the loss does not depend on: its gradient by text would be missing, not zero."""
    trainable = [parameter for parameter in client.parameters() if parameter.requires_grad]
    loss = client(batch.part(0, 1), [0]).totals.sum()
    for parameter, gradient in zip(trainable, torch.autograd.grad(loss, trainable, allow_unused=True), strict=True):
        parameter.requires_grad_(gradient is not None)


def _check_mechanism(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise InputError(f"noise_multiplier must be a finite number of 0 or more, got {noise_multiplier}")
    if not 0 < sample_rate <= 1 or not 0 < delta < 1 or steps < 1:
        raise InputError(
            "sample_rate must lie in (0, 1], delta in (0, 1) and steps from 1 on, "
            f"got {sample_rate}, {delta} and {steps}"
        )


def _rate(sample_rate: float | None, dataset_size: int | None, num_texts: int) -> float:
    if dataset_size is None:
        return 1.0 if sample_rate is None else sample_rate
    if dataset_size < num_texts:
        raise InputError(f"dataset_size must be at least the number of texts, {num_texts}, got {dataset_size}")
    return num_texts / dataset_size


def _opacus() -> Any:
    """The parts of Opacus that are used; importing it must not leave its log handler on the root logger."""
    handlers = logging.root.handlers[:]
    try:
        from opacus.accountants import RDPAccountant
        from opacus.grad_sample import GradSampleHooks
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise InputError(f"DP-SGD needs Opacus ({error}); install it with: pip install 'unmask[dp]'") from None
    finally:
        logging.root.handlers[:] = handlers
    return SimpleNamespace(accountant=RDPAccountant, hooks=GradSampleHooks, optimizer=DPOptimizer)
