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
  const rows = [...body.rows].map(row => [key(row), row]);
  // Cells without a value stay at the end, whichever way the others go.
  rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (down ? -order(a, b) : order(a, b)));
  body.append(...rows.map(([, row]) => row));
}
// Filtering: the table's rows and the details below it follow the same three fields.
const text = document.getElementById("filter-text");
const status_ = document.getElementById("filter-status");
const backend = document.getElementById("filter-backend");
function filter() {
  const wanted = text.value.trim().toLowerCase();
  let shown = 0, all = 0;
  for (const row of document.querySelectorAll("#case-table tbody tr, details.case")) {
    const d = row.dataset;
    const fits = d.text.includes(wanted) && (!status_.value || d.status === status_.value) && (!backend.value || d.backend === backend.value);
    row.hidden = !fits;
    if (row.tagName === "TR") { all += 1; shown += fits; }
  }
  document.getElementById("filter-count").textContent = `${shown} of ${all} rows`;
}
if (text) for (const field of [text, status_, backend]) field.addEventListener("input", filter);
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
