"use strict";
// Sorts a table by the column whose button was pressed. Rows with equal values keep the order of the page (worst first).
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  const status = document.getElementById(table.dataset.sortable);
  const valueOf = (row, column) => {
    const text = row.cells[column].dataset.value;
    return text === undefined || text === "" ? null : text;
  };
  const compare = (column, numeric, sign) => (a, b) => {
    const x = valueOf(a, column), y = valueOf(b, column);
    if (x === null || y === null) return (x === null) - (y === null);
    const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en");
    return sign * order || Number(a.dataset.rank) - Number(b.dataset.rank);
  };
  headers.forEach((header, column) => {
    const button = header.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const descending = header.getAttribute("aria-sort") === "ascending";
      for (const other of headers) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].sort(compare(column, header.dataset.kind === "number", descending ? -1 : 1));
      body.append(...rows);
      status.textContent = `Sorted by ${button.textContent.trim()}, ${descending ? "descending" : "ascending"}.`;
    });
  });
}
// Starting a player pauses all others.
document.addEventListener("play", (event) => {
  for (const player of document.querySelectorAll("audio")) if (player !== event.target) player.pause();
}, true);
// Buttons of a served report send the decision about the audio that the page has.
for (const group of document.querySelectorAll(".decide")) {
  const shown = group.closest("td").querySelector(".decision");
  const buttons = [...group.querySelectorAll("button")];
  shown.setAttribute("aria-live", "polite");
  for (const button of buttons) button.addEventListener("click", async () => {
    const accepted = button.dataset.accepted === "true";
    const reason = accepted ? "" : document.getElementById("reason").value.trim();
    const asked = [Number(group.dataset.index), accepted, group.dataset.sha256, reason];
    for (const one of buttons) one.disabled = true;
    try {
      const answer = await fetch("decisions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) });
      shown.textContent = await answer.text();
      shown.classList.toggle("mark", !answer.ok);
    } catch {
      shown.textContent = "The server of this report does not answer. Nothing was decided.";
      shown.classList.add("mark");
    }
    for (const one of buttons) one.disabled = false;
    button.focus();
  });
}
