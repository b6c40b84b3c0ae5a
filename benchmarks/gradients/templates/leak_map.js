"use strict";
// Every text goes into the page by textContent; nothing that was measured is parsed as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (tag, kind, ...children) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    node.append(...children);
    return node;
  };
  const buttons = [...document.querySelectorAll("button.cell")];
  const clients = [...document.querySelectorAll("tr.client")];

  const show = (measure) => {
    for (const button of buttons) {
      const shown = data.cells[button.dataset.cell].shown[measure];
      button.textContent = shown.label;
      button.className = `cell level-${shown.level}`;
    }
  };
  for (const choice of document.querySelectorAll('input[name="measure"]')) {
    choice.addEventListener("change", () => show(choice.value));
    if (choice.checked) show(choice.value);
  }

  const details = (place) => {
    const table = make("table", "draws", make("tr", "", ...data.columns.map((name) => make("th", "", name))));
    for (const draw of data.cells[place].draws) table.append(make("tr", "", ...draw.map((value) => make("td", "", value))));
    return table;
  };
  const close = (button) => {
    button.setAttribute("aria-expanded", "false");
    document.getElementById(`d${button.dataset.cell}`)?.remove();
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const isOpen = button.getAttribute("aria-expanded") === "true";
      buttons.forEach(close);
      if (isOpen) return;
      const row = button.closest("tr");
      const cell = make("td", "", details(button.dataset.cell));
      cell.colSpan = row.cells.length;
      const detail = make("tr", "detail", cell);
      detail.id = `d${button.dataset.cell}`;
      row.after(detail);
      button.setAttribute("aria-expanded", "true");
    });
  }

  const filter = document.getElementById("filter");
  const count = document.getElementById("count");
  const sift = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    buttons.forEach(close);
    let shown = 0;
    for (const row of clients) {
      const text = `${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    for (const body of document.querySelectorAll("table.map tbody")) {
      body.hidden = ![...body.querySelectorAll("tr.client")].some((row) => !row.hidden);
    }
    count.textContent = `${shown} of ${clients.length} clients`;
  };
  filter.addEventListener("input", sift);
  sift();
})();
