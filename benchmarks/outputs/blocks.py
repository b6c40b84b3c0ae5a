"""Blocks inverted, and the first attention module read: errors, rates, seconds.

    python benchmarks/run.py outputs stack [--dtypes float64 float32] [--tokens 8] [--out results.json]
    python benchmarks/run.py outputs trained [--blocks 0 1 5 …] [--positions 1 4] [--out results.json]
    python benchmarks/run.py outputs first-attention [--model minilm-l6] [--lengths 10 20 40 56] [--dtypes float32 …]

`stack`: 12 random blocks of GPT-2's shape (embeddings ×5, biases and norms not trivial), block by block and token by
token with recovered prefixes. `trained`: single blocks of SmolLM2-135M with exact prefixes; how often a zero residual
is reached, and how often it is the client's row. `first-attention`: exact tokens by length and precision.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from machine import machine
from synthetic import gpt2_shape

from unmask.attacks.outputs.block_step import BlockStep
from unmask.attacks.outputs.first_attention.attack import FirstAttentionAttack
from unmask.attacks.outputs.layer_inputs.blocks import BlockInverter
from unmask.evidence import HiddenEvidence, Site
from unmask.models import Model, load_model
from unmask.models.output_projection import OutputProjection

EMBEDDING_SCALE, VOCAB = 5.0, 5000
LETTER = (
    "The spare key lies under the pot beside the old green door, and the code of the alarm is 4711; please do not "
    "tell anybody about it, in particular not the neighbours, who have been asking for the key every day since they "
    "moved in last summer and would be glad to have it."
)
NOTE = (
    "Dear doctor, the results of the second biopsy came back on Friday and they were positive again. I have not told "
    "my employer, and I would like to keep it that way until the treatment begins in March, so send letters to my "
    "sister's address in Leeds, not to the office."
)


def main() -> None:
    """Measure one of the three, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("stack", "trained", "first-attention"))
    parser.add_argument("--dtypes", nargs="+", help="float64, float32, bfloat16")
    parser.add_argument("--tokens", type=int, default=8, help="stack: tokens of the text")
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 1, 2, 5, 10, 15, 20, 25, 28, 29])
    parser.add_argument("--positions", type=int, nargs="+", default=[2, 7])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 20, 40, 56])
    parser.add_argument("--model", default="smollm2-135m", help="first-attention: a name of the catalogue")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(machine())
    match options.mode:
        case "stack":
            rows = [stack(name, options.tokens) for name in options.dtypes or ("float64", "float32")]
        case "trained":
            rows = trained(options.blocks, options.positions)
        case _:
            dtypes = options.dtypes or ("float64", "float32", "bfloat16")
            rows = first_attention(options.model, options.lengths, dtypes)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), options.mode: rows}, indent=2) + "\n")


def stack(dtype: str, num_tokens: int) -> dict:
    """Errors after each block, seconds and Jacobians a token."""
    model = random_stack().to(dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (1, num_tokens), generator=generator)
    with torch.no_grad():
        states = [rows[0] for rows in model.hidden_states(tokens)]
    print(f"\n12 blocks of GPT-2's shape, {dtype}, {num_tokens} tokens")
    print("block   max error  residual   1/σ_min   J/token     s")
    rows, blocks = states[-1], []
    for block in reversed(range(model.num_blocks)):
        started = time.perf_counter()
        inversion = BlockInverter().invert_block(model, block, rows)
        seconds = time.perf_counter() - started
        rows = inversion.states
        blocks.append(
            {
                "block": block,
                "error": relative_errors(rows, states[block][: len(rows)]).max().item(),
                "residual": inversion.residual,
                "amplification": inversion.amplification,
                "jacobians_a_token": inversion.num_jacobians / num_tokens,
                "exact_rows": inversion.num_exact,
                "seconds": seconds,
            }
        )
        last = blocks[-1]
        print(
            f"{block:>5} {last['error']:>11.1e} {last['residual']:>9.1e} {last['amplification']:>9.2f} "
            f"{last['jacobians_a_token']:>9.2f} {seconds:>5.1f}",
            flush=True,
        )
    growth = (blocks[-1]["error"] / blocks[0]["error"]) ** (1 / (len(blocks) - 1))
    total = sum(block["seconds"] for block in blocks)
    jacobian = jacobian_seconds(model, states[0])
    print(f"error growth a block: ×{growth:.2f}; {total:.0f} s in all; one Jacobian {jacobian:.2f} s")
    return {
        "dtype": dtype,
        "tokens": num_tokens,
        "growth_a_block": growth,
        "seconds": total,
        "jacobian_seconds": jacobian,
        "blocks": blocks,
    }


def random_stack() -> Model:
    """GPT-2's shape as initialised, embeddings larger, biases and norms with noise."""
    model = gpt2_shape(12, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name in (model.token_embedding, model.position_embedding):
                weights.mul_(EMBEDDING_SCALE)
            elif weights.ndim == 1:
                size = 0.02 if name.endswith("bias") else 0.1
                weights.add_(size * torch.randn(weights.shape, generator=generator))
    return model


def jacobian_seconds(model: Model, rows: torch.Tensor) -> float:
    """The least of five."""
    step = BlockStep.first(model, 0)
    seconds = []
    for row in rows[:5]:
        started = time.perf_counter()
        step.jacobian(row)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def trained(blocks: list[int], positions: list[int]) -> list[dict]:
    """Single blocks behind exact prefixes: is the residual zero, and is it the client's row?"""
    model = load_model("smollm2-135m", dtype=torch.float64)
    tokens = torch.tensor([model.encode(LETTER)[: max(positions) + 1]])
    with torch.no_grad():
        states = [rows[0] for rows in model.hidden_states(tokens)]
    print("\nSmolLM2-135M\nblock  position  residual     standing     error  same row     κ(J)   1/σ_min    J     s")
    rows = []
    for block in blocks:
        for position in positions:
            rows.append(trained_row(model, block, position, states[block], states[block + 1][position]))
            row = rows[-1]
            print(
                f"{block:>5} {position:>9} {row['residual']:>9.1e} {row['standing']:>12} {row['error']:>9.1e} "
                f"{row['same_row']!s:>9} {row['condition']:>8.0f} {row['amplification']:>9.1f} {row['jacobians']:>4} "
                f"{row['seconds']:>5.1f}",
                flush=True,
            )
    zero = [row for row in rows if row["standing"] != "NOT_REACHED"]
    print(f"zero residual {len(zero)} of {len(rows)}, of these the client's row {sum(r['same_row'] for r in zero)}")
    return rows


def trained_row(model: Model, block: int, position: int, before: torch.Tensor, output: torch.Tensor) -> dict:
    """One row of a trained block, from its own output as the start."""
    step = BlockStep.first(model, block)
    for index in range(position):
        stepped = step.run(before[index : index + 1])
        step = step.following(stepped.keys, stepped.values)
    started = time.perf_counter()
    preimage, _ = BlockInverter().invert_row(step, output, output)
    error = relative_errors(preimage.row[None], before[position : position + 1]).item()
    # To first order, rounding moves a pre-image by no more than this.
    bound = preimage.amplification * preimage.tolerance * float(output.norm() / before[position].norm())
    return {
        "block": block,
        "position": position,
        "residual": preimage.residual,
        "standing": preimage.standing.name,
        "error": error,
        "same_row": error <= bound,
        "condition": preimage.condition,
        "amplification": preimage.amplification,
        "jacobians": preimage.num_jacobians,
        "seconds": time.perf_counter() - started,
    }


def first_attention(name: str, lengths: list[int], dtypes: list[str]) -> list[dict]:
    """Exact tokens of two texts and of random tokens, by length and precision of the evidence."""
    model = load_model(name)
    drawn = random.Random(0).sample(range(model.vocab_size), max(lengths))
    print(f"\n{name}, output of block 0's attention")
    print("   dtype  length   exact  certain  status          error     next      s")
    rows = []
    for dtype in dtypes:
        for kind, text in {"letter": model.encode(LETTER), "note": model.encode(NOTE), "random": drawn}.items():
            for length in lengths:
                rows.append(
                    {"model": name, "text": kind, "dtype": dtype} | first_attention_row(model, text[:length], dtype)
                )
                row = rows[-1]
                print(
                    f"{dtype:>8} {row['length']:>7} {row['exact']:>7} {row['certain']:>8}  {row['status']:<12} "
                    f"{row['residual']:>8.1e} {row['rejected']:>8.1e} {row['seconds']:>6.1f}",
                    flush=True,
                )
    return rows


def first_attention_row(model: Model, tokens: list[int], dtype: str) -> dict:
    """One text; a float64 client computes in float64, the others in float32, and bfloat16 is how states are sent."""
    client = model.to(dtype=torch.float64, num_blocks=1) if dtype == "float64" else model
    states = attention_output(client, tokens).to(getattr(torch, dtype))
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    started = time.perf_counter()
    found = FirstAttentionAttack()(HiddenEvidence(states, mask, 0, model.fingerprint(), Site.ATTENTION), model)
    seconds = time.perf_counter() - started
    text = found.value.texts[0].tokens if found.value.texts else ()
    certain = int(found.certificate.details.get("certain_tokens", 0))
    return {
        "length": len(tokens),
        "exact": sum(ours == theirs for ours, theirs in zip(text, tokens, strict=False)),
        "certain": certain,
        "status": found.status.name,
        "residual": found.certificate.residual,
        "rejected": found.certificate.rejected or 0.0,
        "tested": found.cost.candidates,
        "seconds": seconds,
    }


@torch.no_grad()
def attention_output(model: Model, tokens: list[int]) -> torch.Tensor:
    """What the attention module of block 0 adds to the stream."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    mixed = model.mixed_values(0, model.embed(ids, positions), positions, torch.ones_like(ids, dtype=torch.bool))
    return OutputProjection.of(model, 0)(mixed)


def relative_errors(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """‖x̂ − x‖ / ‖x‖, row by row."""
    return (rows - others).norm(dim=1) / others.norm(dim=1)


if __name__ == "__main__":
    main()
