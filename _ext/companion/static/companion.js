// The ledger's table: a click on a heading sorts, the two fields above it filter.
document.querySelectorAll(".lg-ledger").forEach((ledger) => {
  const find = ledger.querySelector("[data-lg-find]");
  const verdict = ledger.querySelector("[data-lg-verdict]");
  const filter = () => {
    const word = find.value.trim().toLowerCase();
    ledger.querySelectorAll("tbody tr").forEach((row) => {
      const text = row.textContent.toLowerCase().includes(word);
      row.hidden = !(text && (!verdict.value || row.dataset.verdict === verdict.value));
    });
  };
  find.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  // Shown only here: without a script the fields would do nothing.
  ledger.querySelector(".lg-filter").hidden = false;

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
