// The ledger's table: a click on a heading sorts, the fields above it filter. The page's address
// keeps the filter (what-holds.html?verdict=fails), and leads to a row (what-holds.html#tlh.fig-7).
document.querySelectorAll(".lg-ledger").forEach((ledger) => {
  const fields = [...ledger.querySelectorAll("[data-lg-filter]")];
  const rows = [...ledger.querySelectorAll("tbody tr")];
  const status = ledger.querySelector(".lg-status");
  const name = (field) => field.dataset.lgFilter;
  // What a search looks through: the row as it is read, and its letters spelled out.
  const words = new Map(
    rows.map((row) => [row, `${row.textContent} ${row.dataset.spelled ?? ""}`.toLowerCase()]),
  );
  const passes = (row, field) => {
    const wanted = field.value.trim();
    if (!wanted) return true;
    if (name(field) === "find") return words.get(row).includes(wanted.toLowerCase());
    if (name(field) === "chapter" && row.dataset.part === wanted) return true;
    return row.dataset[name(field)] === wanted;
  };
  const filter = () => {
    rows.forEach((row) => { row.hidden = !fields.every((field) => passes(row, field)); });
    const shown = rows.filter((row) => !row.hidden);
    ledger.querySelectorAll(".lg-table").forEach((table) => {
      table.hidden = ![...table.tBodies[0].rows].some((row) => !row.hidden);
    });
    ledger.querySelectorAll(".lg-counts li").forEach((item) => {
      const count = shown.filter((row) => row.dataset.verdict === item.dataset.verdict).length;
      item.querySelector(".lg-count").textContent = count;
      item.hidden = !count;
    });
    status.textContent = `${shown.length} of ${rows.length} rows shown`;
  };
  const keep = () => {
    const query = new URLSearchParams();
    fields.forEach((field) => field.value.trim() && query.set(name(field), field.value.trim()));
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text && `?${text}`));
  };
  const clear = () => {
    fields.forEach((field) => { field.value = ""; });
    filter();
    keep();
  };
  // On a narrow screen a card shows statement and verdict, and the rest on demand. Folded here and
  // not in the page, so that without a script nothing is out of reach.
  const fold = (row, folded) => {
    row.classList.toggle("lg-folded", folded);
    row.querySelector(".lg-more").setAttribute("aria-expanded", String(!folded));
  };
  rows.forEach((row) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "lg-tool lg-more";
    button.textContent = "Numbers";
    button.setAttribute("aria-label", `Numbers of ${row.id.replace("row-", "")}`);
    button.addEventListener("click", () => fold(row, !row.classList.contains("lg-folded")));
    row.lastElementChild.prepend(button);
    fold(row, true);
  });
  const showRow = () => {
    const id = decodeURIComponent(location.hash.slice(1));
    const row = id && document.getElementById(id)?.closest(".lg-ledger tbody tr");
    if (!row) return;
    // A filter must not hide what the address asks for.
    if (row.hidden) {
      fields.forEach((field) => { field.value = ""; });
      filter();
    }
    fold(row, false);
    row.scrollIntoView({ block: "center" });
  };
  const query = new URLSearchParams(location.search);
  fields.forEach((field) => {
    field.value = query.get(name(field)) ?? "";
    // An address with a value that the list does not have filters nothing.
    if (field.value === "" || field.selectedIndex === -1) field.value = "";
    field.addEventListener(field.tagName === "SELECT" ? "change" : "input", () => { filter(); keep(); });
  });
  ledger.querySelector("[data-lg-all]").addEventListener("click", clear);
  addEventListener("hashchange", showRow);
  filter();
  showRow();
  // Shown only here: without a script the fields would do nothing.
  ledger.querySelector(".lg-filter").hidden = false;
  // Whoever follows a link to some of the rows wants to see them.
  if (!location.hash && fields.some((field) => field.value)) {
    ledger.querySelector(".lg-filter").scrollIntoView();
  }

  ledger.querySelectorAll("th").forEach((head) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const body = head.closest("table").tBodies[0];
      const key = (row) => row.cells[head.cellIndex].textContent.trim();
      [...body.rows]
        .sort((a, b) => (up ? 1 : -1) * key(a).localeCompare(key(b), "en", { numeric: true }))
        .forEach((row) => body.append(row));
      head.parentElement.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
});
