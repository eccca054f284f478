// Each cell of a table notes the head of its column, and whether it is empty or a mark. On a phone, style.css shows
// parameters, and tables that are too wide for the screen, row by row, with these heads before the cells. A table of
// marks is read by its columns, so it stays a table, with narrow columns below turned heads.
const phone = 340;   // pixels that a table may have on the narrowest screen
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const heads = [...table.querySelectorAll("thead tr:first-child > *")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => {
        const text = cell.textContent.trim();
        cell.dataset.label = heads[i] || "";
        if (!text) cell.dataset.empty = "";
        if (text.startsWith("✓")) cell.dataset.mark = "yes";
        if (text.startsWith("✗")) cell.dataset.mark = "no";
      });
    table.style.width = "min-content";
    table.classList.toggle("marks", table.querySelector("[data-mark]") !== null);
    table.classList.toggle("stacked", table.offsetWidth > phone && !table.matches(".marks"));
    table.style.width = "";
  }
});

// On a phone, the entries of the page Messages are folded, except for the one that a link leads to
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const entry = target && (target.closest("details.entry") || target.querySelector(":scope > details.entry"));
  if (!entry) return;
  entry.open = true;
  target.scrollIntoView();
};
document.addEventListener("DOMContentLoaded", () => {
  if (!matchMedia("(max-width: 46em)").matches) return;
  for (const heading of document.querySelectorAll("section#messages h3")) {
    const entry = document.createElement("details");
    entry.className = "entry";
    entry.append(document.createElement("summary"), ...[...heading.parentElement.childNodes].filter((o) => o !== heading));
    heading.parentElement.prepend(entry);
    entry.firstChild.append(heading);
  }
  unfold();
  window.addEventListener("hashchange", unfold);
});
