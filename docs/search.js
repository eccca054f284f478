// The site's changes to the search of Sphinx. build.py writes `keywords` and `said` above this text:
// keywords: {page: [[keyword, anchor of the section that answers or "", heading of that section], …]}
// said: [[text of a message of the package, anchor of its entry, heading of that entry], …]

const typed = () => (window.asked || new URLSearchParams(location.search).get("q") || "").trim();
const lower = (text) => text.toLowerCase();
const letters = (text) => ` ${lower(text).replace(/[^a-z_]+/g, " ").trim()} `;   // no numbers, names end at a blank
const knownMessages = said.map(([text, ...entry]) => [letters(text), ...entry]);

// How well a keyword answers: as it was typed (CLIP is a model, to clip is a verb), in another case, or, if at least
// two words were typed, by containing all of them in any order
const answer = ([keyword]) => {
  const words = lower(typed()).split(/\s+/);
  const known = lower(keyword).split(/\s+/);
  if (keyword === typed()) return 1000;
  if (lower(keyword) === lower(typed())) return 900;
  return words.length > 1 && words.every((word) => known.includes(word)) ? 850 : 0;
};

// The entry of the message from which at least two words were typed
const quoted = () => {
  const text = letters(typed());
  return text.split(" ").length > 3 && knownMessages.find(([message]) => message.includes(text));
};

Scorer.score = (result) => {
  const [page, title, anchor, , score] = result;
  let bonus = /^(guides|get_started|about)/.test(page) ? 10 : 0;
  if (/^(changelog|reference\/messages|about\/compared)$/.test(page)) bonus -= 20;
  if (anchor) return score + bonus;
  const best = (keywords[page] || []).reduce((a, b) => (answer(b) > answer(a) ? b : a), [""]);
  const message = page === "reference/messages" && quoted();
  const found = answer(best) ? best : message;
  if (found && found[1]) {   // the result leads to the section
    result[1] = `${title} > ${found[2]}`;
    result[2] = found[1];
  }
  return score + bonus + (answer(best) || (message ? 800 : 0));
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

// What is shown of a page: its text around the first word that was found, or its beginning if it was found by a
// keyword, without its title and the parts that are not searched
Search.makeSearchSummary = (html, terms) => {
  const page = new DOMParser().parseFromString(html, "text/html").querySelector("[role=main]");
  page.querySelectorAll("h1, .headerlink, .no-search, script").forEach((element) => element.remove());
  const text = page.textContent.trim();
  const escaped = [...terms].map((term) => term.replace(/[^\w ]/g, "\\$&"));
  const start = Math.max(text.search(new RegExp(`(?<!\\w)(${escaped.join("|")})`, "i")) - 120, 0);
  const summary = document.createElement("p");
  summary.classList.add("context");
  summary.textContent = (start ? "…" : "") + text.slice(start, start + 240) + (start + 240 < text.length ? "…" : "");
  return summary;
};

Documentation.TRANSLATIONS["Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories."] =
  "Your search did not match any page. Try other words, or the FAQ, Messages or the cheat sheet.";
