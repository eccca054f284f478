// The site's changes to the search of Sphinx. build.py writes `keywords` and `said` above this text:
// keywords: {page: [[keyword, anchor of the section that answers, or ""], …], …}
// said: [[text of a message of the package, anchor of its entry on the page Messages], …]

const typed = () => (window.asked || new URLSearchParams(location.search).get("q") || "").trim();
const lower = (text) => text.toLowerCase();
const letters = (text) => ` ${lower(text).replace(/[^a-z_]+/g, " ").trim()} `;   // no numbers, names end at a blank

// How well a keyword answers: as it was typed (CLIP is a model, to clip is a verb), in another case, or, if at least
// two words were typed, by containing all of them in any order
const answers = (keyword) => {
  const words = lower(typed()).split(/\s+/);
  const known = lower(keyword).split(/\s+/);
  if (keyword === typed()) return 1000;
  if (lower(keyword) === lower(typed())) return 900;
  return words.length > 1 && words.every((word) => known.includes(word)) ? 850 : 0;
};

// The heading of the section of a page with this anchor
const headingOf = (page, anchor) => {
  const file = Search._index.docnames.indexOf(page);
  const headings = Object.entries(Search._index.alltitles).filter(([, places]) => places.some(([n]) => n === file));
  return headings.map(([heading]) => heading).find((o) => lower(o).replace(/[^\w -]/g, "").replaceAll(" ", "-") === anchor);
};

Scorer.score = (result) => {
  const [page, title, anchor, , score] = result;
  let bonus = /^(guides|get_started|about)/.test(page) ? 10 : 0;
  if (/^(changelog|reference\/messages|about\/compared)$/.test(page)) bonus -= 20;
  if (anchor) return score + bonus;

  let [best, section] = [0, ""];
  for (const [keyword, to] of keywords[page] || [])
    if (answers(keyword) > best) [best, section] = [answers(keyword), to];
  const text = letters(typed());
  if (!best && page === "reference/messages" && text.split(" ").length > 3) {   // at least two words of a message
    const message = said.find(([message]) => letters(message).includes(text));
    if (message) [best, section] = [800, message[1]];
  }
  if (section) {
    const row = page === "reference/messages" ? section.replaceAll("-", " ") : "";   // an entry in a table has no heading
    result[1] = [title, headingOf(page, section) || row].filter((o) => o).join(" > ");
    result[2] = `#${section}`;
  }
  return score + bonus + best;
};

// Sphinx finds pages that have all of the words. If there are none, the pages with most of the words are found, so
// that an error with a number or a path of the reader's machine can be pasted into the search.
const findAllWords = Search._performSearch;
Search._performSearch = (query, terms, excluded, ...rest) => {
  const found = findAllWords(query, terms, excluded, ...rest);
  if (found.length || terms.size < 2) return found;
  const pages = new Map();   // page: [its best result, number of its words]
  for (const term of terms) {
    const one = new Set([term]);
    for (const result of findAllWords(term, one, excluded, one, one)) {
      const [best, n] = pages.get(result[0]) || [result, 0];
      pages.set(result[0], [result[4] > best[4] ? result : best, n + 1]);
    }
  }
  const ordered = [...pages.values()].sort(([a, n], [b, m]) => n - m || a[4] - b[4]);   // Sphinx shows the last first
  return ordered.map(([result]) => result);
};

// A word is found where it begins a word of a page, not within words: Sphinx is shown the words that begin with it
const findTerms = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) => {
  const index = Search._index;
  const wanted = [...terms, ...excluded];
  const matching = (table) => Object.fromEntries(
    Object.entries(table).filter(([word]) => wanted.some((term) => word.startsWith(term))));
  Search._index = { ...index, terms: matching(index.terms), titleterms: matching(index.titleterms) };
  const found = findTerms(terms, excluded);
  Search._index = index;
  return found;
};

// What is shown of a page or of its section: the sentence with the most of the words. The first sentence is shown if the
// title has a word, or if no sentence has one because a keyword has led to the page. Code is shown if no sentence has one.
const longest = 240;   // characters of a summary
const asText = (element) => element.textContent.replace(/\s+/g, " ").trim();
Search.makeSearchSummary = (html, terms, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const title = asText(page.querySelector("h1"));
  const hidden = "h1, .headerlink, .viewcode-link, .no-search, script, summary, .admonition-title";
  page.querySelectorAll(hidden).forEach((element) => element.remove());
  const at = anchor && page.getElementById(anchor.slice(1));
  const root = (at && (at.closest("tr") || at)) || page.querySelector("[role=main]");
  const words = [...terms].map((term) => new RegExp(`(?<!\\w)${term.replace(/[^\w ]/g, "\\$&")}`, "i"));
  const found = (text) => words.filter((word) => word.test(text)).length;
  const parts = (selector) => [...root.querySelectorAll(selector)].filter((o) => !o.querySelector("p, li, td, pre"));
  const sentences = (element) => asText(element).split(/(?<=[.!?:]) (?=[A-Z`“(])/).map((_, i, all) => all.slice(i).join(" "));
  const prose = parts("p, li, td, dd").flatMap(sentences).filter((text) => text.length > 20);
  const first = (text) => text.slice(0, longest);
  const best = (texts) => texts.reduce((a, b) => (found(first(b)) > found(first(a)) ? b : a), texts[0] || "");
  let text = at || !found(title) ? best(prose) : prose[0] || "";
  if (!found(first(text)) && (at || !found(title))) {
    const code = best(parts("pre, dt").map(asText));
    text = found(first(code)) ? code : prose[0] || asText(root);
  }
  const summary = document.createElement("p");
  summary.classList.add("context");
  summary.textContent = text.length > longest ? `${text.slice(0, longest).replace(/\s+\S*$/, "")} …` : text;
  return summary;
};

Documentation.TRANSLATIONS["Search finished, found one page matching the search query."] =
  ["One result", "${resultCount} results"];
Documentation.TRANSLATIONS["Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories."] =
  "Your search did not match any page. Try other words, or the FAQ, Messages or the cheat sheet.";
