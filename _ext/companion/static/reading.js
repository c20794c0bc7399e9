// Everything here adds to a page that is whole without it: pictures in full size, tables that say
// what their heads are, and paper that shows what a click would.

// --- boxes that scroll sideways ------------------------------------------------------------------

// A box that scrolls can be reached by keyboard, has a name, and says so to the eye; one that does
// not would be a useless stop.
const SIDEWAYS = "\u2194 scrolls sideways";
const isTooWide = (box) => box.scrollWidth > box.clientWidth + 1;
const makeStop = (box, name) => {
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", name);
};
const removeStop = (box) => {
  for (const attribute of ["tabindex", "role", "aria-label"]) box.removeAttribute(attribute);
};
const followWidth = (box, name, hint, also = () => {}) => {
  hint.textContent = SIDEWAYS;
  // A region with a name is a stop in any case.
  const stays = box.getAttribute("role") === "region";
  const fit = () => {
    const scrolls = isTooWide(box);
    hint.hidden = !scrolls;
    if (!stays) scrolls ? makeStop(box, `${name}, scrolls sideways`) : removeStop(box);
    also();
  };
  new ResizeObserver(fit).observe(box);
  fit();
};

const hintBelow = (box) => {
  const hint = document.createElement("div");
  hint.className = "lg-tools";
  box.after(hint);
  return hint;
};

// --- pictures in full size ---------------------------------------------------------------------

// One window for all pictures of the page. A <dialog> keeps the focus inside and gives it back.
const viewer = document.createElement("dialog");
viewer.className = "lg-viewer";
viewer.setAttribute("aria-label", "Figure in full size");
viewer.innerHTML =
  `<form method="dialog"><span>${SIDEWAYS}</span> <button class="lg-tool" autofocus>Close</button></form>` +
  '<div tabindex="0" role="group" aria-label="Figure, scrolls both ways"></div>';

viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
// A browser would do this by itself, if the theme's scripts let the key through.
viewer.addEventListener("keydown", (event) => event.key === "Escape" && viewer.close());

const enlarge = (figure) => {
  // A slider has many pictures, of which one is shown.
  const shown = figure.querySelector(".lg-wide img:not([hidden])");
  const copy = shown.cloneNode();
  const width = Number(shown.getAttribute("width"));
  copy.removeAttribute("class");
  const shownWidth = `max(${0.75 * width}px, min(${width}px, 92vw))`;
  copy.style.cssText = `display:block;height:auto;max-width:none;width:${shownWidth}`;
  viewer.lastElementChild.replaceChildren(copy);
  viewer.showModal();
  viewer.querySelector("span").hidden = !isTooWide(viewer.lastElementChild);
};

const preparePictures = () => {
  const figures = [...document.querySelectorAll("figure:has(> .lg-wide)")];
  if (!figures.length) return;
  document.body.append(viewer);
  for (const figure of figures) {
    const box = figure.querySelector(".lg-wide");
    const tools = document.createElement("div");
    tools.className = "lg-tools";
    const hint = document.createElement("span");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "lg-tool";
    button.textContent = "Enlarge";
    button.setAttribute("aria-haspopup", "dialog");
    button.addEventListener("click", () => enlarge(figure));
    tools.append(hint, button);
    box.after(tools);
    followWidth(box, "Figure", hint, () => {
      // Only where the picture is clearly smaller than it was drawn is there anything to gain.
      const image = box.querySelector("img:not([hidden])");
      tools.hidden = image.clientWidth > 0.85 * Number(image.getAttribute("width"));
    });
  }
};

// --- tables of pandas --------------------------------------------------------------------------

// pandas writes corners as empty heads, which are announced as heads of nothing, does not say
// whether a head is one of a column or of a row, and lets numbers break at their minus sign.
const NUMBER = /^[-+\u2212\u00b1[(]?\.?\d|^(NaN|inf)$/;

// The cells of some rows by their column, counted from the right: rows whose first heads were
// drawn together with those above have fewer on the left.
const byColumn = (rows) => {
  const columns = new Map();
  for (const row of rows) {
    let at = 0;
    for (const cell of [...row.cells].reverse()) {
      if (cell.colSpan === 1) columns.set(at, [...(columns.get(at) ?? []), cell]);
      at += cell.colSpan;
    }
  }
  return columns;
};

// Numbers stand digit below digit, and a head stands as its column does.
const alignColumns = (table) => {
  const heads = byColumn(table.tHead?.rows ?? []);
  const body = byColumn([...table.tBodies].flatMap((part) => [...part.rows]));
  for (const [at, cells] of body) {
    // A dash stands for a missing value, in a column of numbers as well.
    const texts = cells.map((cell) => cell.textContent.trim()).filter((text) => text && text !== "–");
    const name = texts.length && texts.every((text) => NUMBER.test(text)) ? "lg-number" : "lg-word";
    for (const cell of [...cells, ...(heads.get(at) ?? [])]) cell.classList.add(name);
  }
};

// A value and its interval may stand one below the other, each in one piece.
const breakBeforeInterval = (cell) => {
  const [, value, interval] = cell.textContent.trim().match(/^([^[]*\S) (\[[^\]]*\])$/) ?? [];
  if (!interval) return;
  const parts = [value, interval].map((text) => {
    const part = document.createElement("span");
    part.className = "lg-together";
    part.textContent = text;
    return part;
  });
  cell.replaceChildren(parts[0], " ", parts[1]);
  cell.classList.add("lg-interval");
};

// A table that would have to scroll stands a little tighter.
const tightenTables = () => {
  for (const table of document.querySelectorAll(".cell_output > .output table.dataframe")) {
    const box = table.closest(".cell_output > .output");
    table.classList.remove("lg-tight");
    table.classList.toggle("lg-tight", box.scrollWidth > box.clientWidth);
  }
};

const prepareTables = () => {
  for (const table of document.querySelectorAll("table.dataframe")) {
    for (const head of table.querySelectorAll("th")) {
      if (head.textContent.trim()) {
        const group = head.colSpan > 1 ? "colgroup" : "col";
        const rows = head.rowSpan > 1 ? "rowgroup" : "row";
        head.scope = head.closest("thead") ? group : rows;
        continue;
      }
      const corner = document.createElement("td");
      for (const { name, value } of head.attributes) corner.setAttribute(name, value);
      head.replaceWith(corner);
    }
    // 1e-16 is one word; several words would stand one below the other on a narrow screen.
    for (const cell of table.querySelectorAll("td, tbody th")) {
      if (!/\s/.test(cell.textContent.trim())) cell.style.whiteSpace = "nowrap";
      else if (cell.matches("th")) {
        cell.style.minWidth = `${Math.min(14, Math.max(8, 0.5 * cell.textContent.length))}rem`;
      }
    }
    alignColumns(table);
    for (const cell of table.querySelectorAll("td.lg-number")) breakBeforeInterval(cell);
    const box = table.closest(".cell_output > .output");
    if (box) {
      followWidth(box, "Table", hintBelow(box));
    }
  }
  // Tables of the text, and those that are sorted by a click, whose box has a name already.
  for (const box of document.querySelectorAll('.pst-scrollable-table-container, .lg-sortable [role="region"]')) {
    followWidth(box, "Table", hintBelow(box));
  }
  tightenTables();
  // The article is as wide as the theme's columns leave it, which they do after the window's event.
  const article = document.querySelector("article");
  if (article) new ResizeObserver(tightenTables).observe(article);
};

// --- long names --------------------------------------------------------------------------------

// In narrow columns a function's name goes to the next line after a dot or an underscore, instead of
// anywhere.
const breakNames = () => {
  for (const name of document.querySelectorAll("code.lg-function .pre")) {
    const parts = name.textContent.split(/(?<=[._])/);
    name.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }
};

// --- formulas and what belongs to them ----------------------------------------------------------

// To a browser a formula is a picture, beside which a line may end: also before a comma and behind
// a bracket.
const keepTogether = () => {
  for (const formula of document.querySelectorAll("article span.math")) {
    const core = formula.closest("a.lg-symbol") ?? formula;
    const before = core.previousSibling;
    const after = core.nextSibling;
    const opening = before?.nodeType === Node.TEXT_NODE ? before.data.match(/[([\u201c]+$/)?.[0] : "";
    const closing = after?.nodeType === Node.TEXT_NODE ? after.data.match(/^[,.;:!?)\]%\u201d\u2019]+/)?.[0] : "";
    if (!opening && !closing) continue;
    const span = document.createElement("span");
    span.className = "lg-together";
    core.before(span);
    span.append(core);
    if (opening) {
      before.data = before.data.slice(0, -opening.length);
      span.prepend(opening);
    }
    if (closing) {
      after.data = after.data.slice(closing.length);
      span.append(closing);
    }
  }
};

// A display that is a little too wide becomes a little smaller; one that is far too wide, as on a
// narrow screen, scrolls in its box.
const fitFormulas = () => {
  const sizes = [];
  for (const box of document.querySelectorAll("div.math")) {
    const container = box.querySelector("mjx-container");
    const formula = container?.querySelector("mjx-math");
    if (!formula) continue;
    container.dataset.lgSize ??= container.style.fontSize;
    container.style.fontSize = container.dataset.lgSize;
    sizes.push([box, container, formula]);
  }
  // All are measured before one is changed, so that the page is laid out once.
  const shares = sizes.map(([box, , formula]) => box.clientWidth / formula.getBoundingClientRect().width);
  for (const [k, [, container]] of sizes.entries()) {
    if (shares[k] > 0.8 && shares[k] < 1) {
      container.style.fontSize = `${Math.floor(shares[k] * parseFloat(container.dataset.lgSize))}%`;
    }
  }
};
const prepareFormulas = () => {
  fitFormulas();
  for (const box of document.querySelectorAll("div.math")) followWidth(box, "Formula", hintBelow(box));
};
addEventListener("load", () => window.MathJax?.startup?.promise?.then(prepareFormulas));
// A telephone that is turned has another width.
addEventListener("resize", fitFormulas);

// --- paper -------------------------------------------------------------------------------------

let unfolded = [];
let theme;
window.addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const details of unfolded) details.open = true;
  theme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
window.addEventListener("afterprint", () => {
  for (const details of unfolded) details.open = false;
  document.documentElement.dataset.theme = theme;
});

preparePictures();
prepareTables();
breakNames();
keepTogether();
