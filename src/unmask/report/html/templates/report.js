
"use strict";
// Every text goes into the page by textContent; nothing that was read is ever parsed as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const body = document.querySelector("#table tbody");
  const words = data.outcomes;
  let revealed = false;

  const make = (tag, kind, ...children) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };
  const card = (title, kind, ...children) => make("section", `card ${kind}`, make("h3", "", title), ...children);
  const pairs = (list) => {
    const node = make("dl", "pairs");
    for (const [name, value] of list) node.append(make("div", "", make("dt", "", name), make("dd", "", value)));
    return node;
  };
  const folded = (title, ...children) => make("details", "", make("summary", "", title), ...children);

  // Rows

  const rows = data.findings.map((finding, place) => {
    const tr = document.getElementById(`f${place}`);
    const cell = (key) => tr.querySelector(`.k-${key}`).textContent;
    const [outcome, leak, gate] = finding.order;
    const gates = finding.gates.map(([text]) => text).join(" ");
    return {
      tr, finding, place, details: null, button: tr.querySelector("button"),
      keys: { outcome, leak, gate, case: cell("case"), channel: cell("channel"), model: cell("model"), id: finding.id },
      text: [finding.name, words[finding.outcome], finding.status, finding.id, gates, data.strings[finding.reason]]
        .join(" ").toLowerCase(),
    };
  });

  // Details of a finding

  const marks = { p: "in place", b: "known to occur, but not here", n: "missed, or false in the recovered text" };
  const counted = (text) => {
    const count = (mark) => [...text.marks].filter((sign) => sign === mark).length;
    return `${text.marks.length} tokens: ${count("p")} in place, ${count("b")} known to occur, ${count("n")} missed or false`;
  };
  const tokens = (text, kind) => {
    const cut = text.cut ? make("p", "absent", `… (${text.cut} tokens)`) : null;
    if (revealed && text.pieces) {
      const line = make("div", `text shown ${kind}`);
      text.pieces.forEach((piece, at) => line.append(make("span", `tok ${text.marks[at]}`, data.pieces[piece])));
      return make("div", "", line, make("p", "hidden", `${counted(text)}.`), cut);
    }
    const line = make("div", "blocks");
    line.setAttribute("role", "img");
    line.setAttribute("aria-label", `Redacted. ${counted(text)}.`);
    for (const mark of text.marks) line.append(make("span", `block ${mark}`));
    return make("div", "", line, cut);
  };
  const side = (title, text, absent) =>
    make("div", "", make("h4", "", title), text ? tokens(text, "") : make("p", "absent", absent));

  const sample = (mark) => revealed ? make("span", "shown", make("span", `tok ${mark}`, "token")) : make("span", `block ${mark}`);

  const texts = (finding) => {
    if (!finding.texts && !finding.bag && !finding.left_out) return null;
    const keys = make("ul", "keys");
    for (const [mark, word] of Object.entries(marks)) keys.append(make("li", "", sample(mark), word));
    const node = card("True and recovered text", "wide texts", keys);
    for (const pair of finding.texts || []) {
      const told = [];
      if (pair.recovered)
        told.push(pair.exact ? "exact" : pair.near_exact ? "near-exact" : "not exact", pair.certain ? "certain by its certificate" : "a best effort");
      if (pair.count > 1) told.push(`${pair.count} times in the batch`);
      const open = (pair.open || []).map(([plain, full]) => make("p", "told", `Open: ${revealed && full ? full : plain}`));
      node.append(make("div", "pair",
        side("True", pair.true, finding.metrics.length ? "matches no true text" : "not known to the auditor"),
        side("Recovered", pair.recovered, "no text recovered"),
        told.length ? make("p", "told", told.join(" · ")) : null, ...open));
    }
    if (finding.left_out) node.append(make("p", "absent", `${finding.left_out} more texts are left out here; findings.jsonl has them.`));
    if (finding.bag) node.append(make("div", "pair", make("div", "told", make("h4", "", "Bag of words"), tokens(finding.bag, "bag"))));
    if (!data.secrets) node.append(make("p", "absent", "Redacted: this file holds no piece of a text."));
    return node;
  };

  const scores = (finding) => {
    if (!finding.metrics.length)
      return card("Measured", "", make("p", "absent", "No score, because the auditor does not know the secret. Only the certificate supports the claim."));
    const table = make("table", "scores");
    const head = make("tr", "");
    for (const word of ["Metric", "Measured", "Chance"]) { const th = make("th", "", word); th.scope = "col"; head.append(th); }
    table.append(make("thead", "", head));
    const lines = make("tbody", "");
    for (const [name, value, chance] of finding.metrics) {
      const th = make("th", "", name); th.scope = "row";
      lines.append(make("tr", "", th, make("td", "", value), make("td", "", chance || "–")));
    }
    table.append(lines);
    const note = finding.outcome === "INCONCLUSIVE" ? make("p", "absent", "The attack is inconclusive, so a low number here means nothing.") : null;
    return card("Measured, beside chance", "", note, table);
  };

  const certificate = (finding) => {
    const proof = finding.certificate;
    if (!proof) return card("Certificate", "", make("p", "absent", "None: nothing was claimed."));
    return card("Certificate: what the adversary can check without the secret", "",
      make("p", "", make("strong", "", `${proof.word} `), `Claim: ${data.strings[proof.claim]}`), pairs(proof.numbers));
  };

  const threat = (finding) => {
    const story = data.threats[finding.threat];
    const limits = make("ul", "");
    for (const limit of story.limits) limits.append(make("li", "", limit));
    if (finding.limit !== undefined) limits.append(make("li", "", data.strings[finding.limit]));
    return card("Threat model", "", pairs([["Adversary", story.who], ["Sees", story.sees], ["Wants", story.wants]]),
      folded("Limits of the attack", limits, make("p", "", `More: ${story.page}`)));
  };

  const stops = (finding) => {
    if (finding.outcome !== "LEAK" || !finding.stops) return null;
    if (!finding.stops.length)
      return card("What stopped it, in this audit", "", make("p", "", "No other case of this audit differs only in its protection and leaks less. docs/defences.md has other measurements."));
    const list = make("ul", "");
    for (const [place, protection, effect] of finding.stops) {
      const link = make("a", "", protection);
      link.href = `#f${place}`;
      list.append(make("li", "", link, `: ${effect} `, make("code", "", data.findings[place].id)));
    }
    return card("What stopped it, in this audit", "", list);
  };

  const command = (finding) => {
    if (!finding.command)
      return card("Repeat it", "wide", make("p", "absent", "This finding comes from a live federation, so no command can repeat it."));
    const text = make("pre", "", finding.command);
    const button = make("button", "plain-button copy", "Copy");
    button.type = "button";
    const told = make("span", "copied");
    told.setAttribute("role", "status");
    const tell = (word) => { told.textContent = word; setTimeout(() => { told.textContent = ""; }, 3000); };
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(text);
      const selected = () => tell("Selected: copy it by hand");
      if (navigator.clipboard) navigator.clipboard.writeText(finding.command).then(() => tell("Copied"), selected);
      else selected();
    });
    const note = data.shortened ? make("p", "absent", "Redacted: folders are left out. Run the command in the folder that contains these files.") : null;
    return card("Repeat it", "wide", make("div", "command", text, button, told), note);
  };

  const panel = (finding) => {
    const pill = make("span", `pill o-${finding.outcome}`, words[finding.outcome]);
    const top = card(finding.name, "wide", make("p", "", pill, make("span", "status", finding.status)),
      make("p", "", data.meanings[finding.status]));
    const reason = data.strings[finding.reason];
    if (finding.note !== undefined) top.append(make("p", "", data.strings[finding.note]));
    if (reason) top.append(make("p", "", make("strong", "", "Why: "), reason));
    if (finding.traceback) top.append(make("pre", "trace", finding.traceback.join("\n")));
    if (finding.looked_for !== undefined) top.append(make("p", "", make("strong", "", "Looked for: "), data.strings[finding.looked_for]));
    if (finding.control !== undefined) top.append(make("p", "", make("strong", "", "Control: "), data.strings[finding.control]));
    for (const [gate, ruling, why] of finding.gates)
      top.append(make("p", "", make("span", `pill g-${ruling}`, ruling), " ", make("code", "", gate), ` ${data.strings[why]}`));
    const used = data.strings[finding.used];
    const cost = card("Cost", "", pairs([...finding.cost, ...finding.run]), used ? folded("Tensors used", make("p", "", make("code", "", used))) : null);
    const spec = [["id", finding.id], ...finding.case];
    if (finding.fingerprint) spec.push(["model fingerprint", finding.fingerprint]);
    return make("div", "panel", ...[top, texts(finding), scores(finding), certificate(finding), threat(finding), stops(finding),
      cost, card("Specification", "", pairs(spec)), command(finding)].filter(Boolean));
  };

  const fill = (row) => row.details.firstChild.replaceChildren(panel(row.finding));
  const toggle = (row, open) => {
    if (open && !row.details) {
      const cell = make("td", "");
      cell.colSpan = 7;
      cell.setAttribute("role", "cell");
      row.details = make("tr", "details", cell);
      row.details.id = `d${row.place}`;
      row.details.setAttribute("role", "row");
      fill(row);
      row.tr.after(row.details);
      row.button.setAttribute("aria-controls", row.details.id);
    }
    if (row.details) row.details.hidden = !open;
    row.tr.classList.toggle("is-open", open);
    row.button.setAttribute("aria-expanded", String(open));
  };
  body.addEventListener("click", (event) => {
    const tr = event.target.closest("tr[id^=f]");
    const selects = !event.target.closest("button.open") && String(getSelection());
    if (!tr || selects || event.target.closest("a")) return;
    const row = rows[Number(tr.id.slice(1))];
    toggle(row, row.button.getAttribute("aria-expanded") !== "true");
  });

  // Filters

  const field = (id) => document.getElementById(id);
  const apply = () => {
    const sought = field("q").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [outcome, channel, gate] = ["by-outcome", "by-channel", "by-gate"].map((id) => field(id).value);
    let shown = 0;
    for (const row of rows) {
      const fits = (!outcome || row.finding.outcome === outcome) && (!channel || row.keys.channel === channel) &&
        (!gate || row.finding.gate === gate) && sought.every((word) => row.text.includes(word));
      if (row.tr.hidden === fits) row.tr.hidden = !fits;
      if (row.details) row.details.hidden = !fits || row.button.getAttribute("aria-expanded") !== "true";
      shown += fits;
    }
    const all = rows.length.toLocaleString("en");
    field("count").textContent = shown === rows.length ? `${all} ${rows.length === 1 ? "finding" : "findings"}`
      : `${shown.toLocaleString("en")} of ${all} findings`;
  };
  field("filters").addEventListener("input", apply);
  field("filters").addEventListener("submit", (event) => event.preventDefault());
  field("filters").addEventListener("reset", () => setTimeout(apply));

  // Sorting

  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => typeof a === "number" ? a - b : collator.compare(a, b);
  for (const button of document.querySelectorAll("#table thead button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = button.dataset.sort;
      const order = [...rows].sort((a, b) => (down ? -1 : 1) * compare(a.keys[key], b.keys[key]) || a.place - b.place);
      body.append(...order.flatMap((row) => row.details ? [row.tr, row.details] : [row.tr]));
    });
  }

  // Links to findings, and the switch that shows texts

  const follow = () => {
    const match = /^#f(\d+)$/.exec(location.hash);
    const row = match && rows[Number(match[1])];
    if (!row) return;
    if (row.tr.hidden) { field("filters").reset(); apply(); }
    toggle(row, true);
    row.tr.scrollIntoView({ block: "start" });
    requestAnimationFrame(() => row.tr.scrollIntoView({ block: "start" })); // rows above have their true heights now
    row.button.focus({ preventScroll: true });
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#f']");
    if (link && link.hash === location.hash) follow();
  });
  const reveal = field("reveal");
  if (reveal) reveal.addEventListener("click", () => {
    revealed = !revealed;
    reveal.setAttribute("aria-checked", String(revealed));
    for (const row of rows) if (row.details) fill(row);
  });

  // Print: folded notes are opened. Findings and the numbers of charts are printed as they are on the screen: opened, each takes pages.

  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open], figure *)")];
    for (const fold of unfolded) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of unfolded) fold.open = false;
  });
  apply();
  follow();
})();
