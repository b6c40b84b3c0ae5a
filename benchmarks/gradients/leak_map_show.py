"""Tables, a plot and a page of the map of the leak, over draws of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradients.leak_map_clients import Cell, Client, clients_of, join
from gradients.leak_map_page import write_page

DOCS = Path(__file__).parents[2] / "docs"
FIGURE, PAGE = DOCS / "leak_map.svg", DOCS / "leak_map.html"
CHANCE = 0.01  # of the tokens: a client that gives away no more than that gives away nothing


def show(cells: list[Cell], draw: bool = True) -> None:
    """The map, the budget at which nothing is left; a figure if possible."""
    clients = clients_of(cells)
    for part in (leak_table(clients), budgets(clients)):
        print("\n".join(["", *part]))
    if not draw:
        return
    write_page(clients, PAGE)
    print(f"\npage: {PAGE}")
    try:
        plot(clients)
    except ImportError:
        print("(no figure: pip install 'unmask[plots]')")


def leak_table(clients: Sequence[Client]) -> list[str]:
    """One line for each protocol and defence: what it costs the update, and what is left of texts and tokens."""
    models = sorted({client.model for client in clients})
    lines = [
        f"| client | defence | texts | cosine | {' | '.join(models)} |",
        f"| --- | --- | --- | --: | {' | '.join('---' for _ in models)} |",
    ]
    by_key = {(c.protocol, c.defence, c.batch, c.model): c for c in clients}
    for protocol, defence, batch in dict.fromkeys((c.protocol, c.defence, c.batch) for c in clients):
        row = [by_key.get((protocol, defence, batch, model)) for model in models]
        ended = [cell for client in row if client is not None for cell in client.ended]
        told = " | ".join("" if client is None else leak(client) for client in row)
        cost = join([cell["cosine"] for cell in ended], ".2f") if defence and ended else ""
        epsilons = [cell["epsilon"] for cell in ended if cell["epsilon"] is not None]
        name = f"`{protocol}`" + (f" (ε {join(epsilons, '.2g')})" if epsilons else "")
        lines.append(f"| {name} | {f'`{defence}`' if defence else 'none'} | {batch} | {cost} | {told} |")
    return lines


def leak(client: Client) -> str:
    """Texts and tokens of a client over its draws, in words."""
    late = f"; {client.num_stopped} of {len(client.draws)} draws stopped" if client.num_stopped else ""
    if not client.ended:
        return f"stopped after {client.draws[0]['seconds']:.0f} s"
    exact, guessed = client.total("exact"), client.total("guessed")
    texts = f"**{exact} of {client.num_texts} texts**" if exact else "no text"
    also = f", {guessed - exact} {'more ' if exact else ''}guessed" if guessed > exact else ""
    false = f", {client.total('false')} false" if client.total("false") else ""
    recalls = [100 * cell["recall"] for cell in client.ended]
    recall = f"{join(recalls, '.0f')} % of tokens" if any(recalls) else "no token"
    return f"{texts}{also}; {recall}{false}; {join([c['seconds'] for c in client.ended], '.0f')} s{late}"


def budgets(clients: Sequence[Client]) -> list[str]:
    """The largest ε of DP-SGD at which no more than chance is left in any draw, and the smallest at which more is."""
    lines = []
    for model in sorted({client.model for client in clients}):
        private = [c for client in clients if client.model == model for c in client.ended if c["epsilon"] is not None]
        telling = [c["epsilon"] for c in private if c["recall"] > CHANCE]
        blind = [c["epsilon"] for c in private if c["epsilon"] < min(telling, default=0.0)]
        if blind and telling:
            lines.append(f"- {model}: chance up to ε = {max(blind):.3g}, more from ε = {min(telling):.3g}")
    return lines


def plot(clients: Sequence[Client]) -> None:
    """Tokens and certain texts against the strength of Gaussian noise and of DP-SGD, with the range over draws."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    families = (
        ("noise:sigma=", "defence", "σ of Gaussian noise on every entry"),
        ("noise_multiplier=", "protocol", "noise multiplier of DP-SGD (clipping norm 1)"),
    )
    for axis, (key, field, label) in zip(axes, families, strict=True):
        for model in sorted({client.model for client in clients}):
            chosen = [c for c in clients if c.model == model and key in getattr(c, field) and c.ended]
            chosen = sorted(chosen, key=lambda c: _strength(getattr(c, field), key))
            if not chosen:
                continue
            strength = [_strength(getattr(c, field), key) for c in chosen]
            (line,) = axis.plot(strength, [c.median("recall") for c in chosen], marker="o", label=f"{model}: tokens")
            low, high = zip(*(c.span("recall") for c in chosen), strict=True)
            axis.fill_between(strength, low, high, color=line.get_color(), alpha=0.15)
            shares = [c.total("exact") / c.num_texts for c in chosen]
            axis.plot(strength, shares, marker="s", linestyle=":", color=line.get_color(), label="certain texts")
        axis.axhline(CHANCE, color="grey", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share recovered")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    pyplot.close(figure)
    print(f"figure: {FIGURE}")


def _strength(text: str, key: str) -> float:
    return float(text.split(key)[1].split(",")[0])
