// Everything here adds to a page that is whole without it: pictures in full size, tables that say
// what their heads are, and paper that shows what a click would.

// --- boxes that scroll sideways ------------------------------------------------------------------

// A box that scrolls can be reached by keyboard, has a name, and says so to the eye; one that does
// not would be a useless stop.
const followWidth = (box, name, hint, also = () => {}) => {
  hint.textContent = "\u2194 scrolls sideways";
  const fit = () => {
    const scrolls = box.scrollWidth > box.clientWidth + 1;
    hint.hidden = !scrolls;
    if (scrolls) {
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", `${name}, scrolls sideways`);
    } else {
      for (const attribute of ["tabindex", "role", "aria-label"]) box.removeAttribute(attribute);
    }
    also();
  };
  new ResizeObserver(fit).observe(box);
  fit();
};

// --- pictures in full size ---------------------------------------------------------------------

// One window for all pictures of the page. A <dialog> keeps the focus inside and gives it back.
const viewer = document.createElement("dialog");
viewer.className = "lg-viewer";
viewer.setAttribute("aria-label", "Figure in full size");
viewer.innerHTML =
  '<form method="dialog"><button class="lg-tool" autofocus>Close</button></form>' +
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
      else if (cell.matches("th")) cell.style.minWidth = "8rem";
    }
    const box = table.closest(".cell_output > .output");
    if (box) {
      const hint = document.createElement("div");
      hint.className = "lg-tools";
      box.after(hint);
      followWidth(box, "Table", hint);
    }
  }
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
