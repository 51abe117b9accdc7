// Sorts and filters the table of all measurements. The choices are stored after the # of the address, to share them.
const table = document.getElementById("measurements");
const form = document.getElementById("controls");
const headings = [...table.tHead.rows[0].cells];
const body = table.tBodies[0];
const rows = [...body.rows];
const words = rows.map((row) => row.textContent.toLowerCase());
const chosen = new URLSearchParams(location.hash.slice(1));

const cell = (row, column) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();

function compare(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
  return isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function show() {
  const wanted = (chosen.get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const column = headings.findIndex((heading) => heading.dataset.name === chosen.get("sort"));
  const down = chosen.has("down");
  headings.forEach((heading, i) => {
    if (i === column) heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  });
  const order = rows.map((row, i) => i);
  if (column >= 0) {
    const values = rows.map((row) => cell(row, column));
    const empty = (i) => values[i] === "";
    order.sort((i, j) => (empty(i) || empty(j) || !down ? 1 : -1) * compare(values[i], values[j]) || i - j);
  }
  let count = 0;
  for (const i of order) {
    const { suite, dtype } = rows[i].dataset;
    const fits = (name, value) => !chosen.get(name) || chosen.get(name) === value;
    rows[i].hidden = !(fits("suite", suite) && fits("dtype", dtype) && wanted.every((word) => words[i].includes(word)));
    count += !rows[i].hidden;
  }
  body.append(...order.map((i) => rows[i]));
  document.getElementById("count").textContent = `${count} of ${rows.length}`;
}

function choose(changes) {
  for (const [name, value] of Object.entries(changes)) value ? chosen.set(name, value) : chosen.delete(name);
  history.replaceState(null, "", `#${chosen}`);
  show();
}

for (const heading of headings) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = heading.textContent;
  heading.dataset.name = heading.textContent;
  heading.replaceChildren(button);
  button.addEventListener("click", () => {
    const again = chosen.get("sort") === heading.dataset.name;
    choose({ sort: heading.dataset.name, down: again && !chosen.has("down") ? "1" : "" });
  });
}
for (const control of form.querySelectorAll("input, select")) {
  control.value = chosen.get(control.name) ?? "";
  control.addEventListener("input", () => choose({ [control.name]: control.value }));
}
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = false;
show();
