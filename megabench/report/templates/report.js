"use strict";
// Sorting: a click on a head sorts by its column, a second click the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (button) button.addEventListener("click", () => sortBy(table, heads, head, column, button.dataset.sort));
  });
}
function sortBy(table, heads, head, column, kind) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = table.tBodies[0];
  const key = row => {
    const cell = row.cells[column];
    if (kind !== "number") return cell.textContent.trim();
    return cell.dataset.key === "" ? null : Number(cell.dataset.key);
  };
  const order = (a, b) => kind === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  const rows = [...body.rows].filter(row => !isEvidence(row)).map(row => [key(row), row, evidenceOf(row)]);
  // Cells without a value stay at the end, whichever way the others go.
  rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (down ? -order(a, b) : order(a, b)));
  for (const [, row, evidence] of rows) body.append(row, ...(evidence ? [evidence] : []));
}
// Evidence: a row may have one below it, shown while its button is pressed and the row is.
const isEvidence = row => row !== null && row.classList.contains("evidence");
const evidenceOf = row => isEvidence(row.nextElementSibling) ? row.nextElementSibling : null;
function showEvidence(row) {
  const below = evidenceOf(row);
  if (below) below.hidden = row.hidden || row.querySelector("button.more").getAttribute("aria-expanded") !== "true";
}
for (const button of document.querySelectorAll("button.more")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    showEvidence(button.closest("tr"));
  });
}
// Filtering: a form names the rows it filters; each of its fields looks at the row's data of that name.
for (const form of document.querySelectorAll("form.filters")) {
  const fields = [...form.querySelectorAll("[data-field]")];
  const fits = row => fields.every(field => {
    const wanted = field.value.trim(), value = row.dataset[field.dataset.field];
    return field.type === "search" ? value.includes(wanted.toLowerCase()) : !wanted || value === wanted;
  });
  form.addEventListener("input", () => {
    let shown = 0, all = 0;
    for (const row of document.querySelectorAll(form.dataset.rows)) {
      row.hidden = !fits(row);
      if (row.tagName === "TR") { all += 1; shown += !row.hidden; showEvidence(row); }
    }
    form.querySelector("output").textContent = `${shown} of ${all} rows`;
  });
}
// A link to a case opens its detail.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") { target.hidden = false; target.open = true; target.scrollIntoView(); }
}
addEventListener("hashchange", openTarget);
openTarget();
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const command = button.previousElementSibling.textContent;
    try { await navigator.clipboard.writeText(command); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(button.previousElementSibling); button.textContent = "selected"; }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
