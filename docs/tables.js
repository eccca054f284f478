// Each cell of a table notes the head of its column, and whether it is empty or a mark. On a phone, style.css shows
// parameters, and tables that are too wide for the screen, row by row, with these heads before the cells.
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
    table.classList.toggle("stacked", table.offsetWidth > phone);
    table.style.width = "";
  }
});
