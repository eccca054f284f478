// The site's changes to the search of Sphinx. build.py writes `keywords` and `said` above this text:
// keywords: {page: [[keyword, anchor of the section that answers, or ""], …], …}
// headings: {page: {anchor that is not made from a heading: heading above it, …}, …}
// said: [[text of a message of the package, anchor of its entry on the page Messages], …]

let corrected = "";   // the query without typos, if nothing was found for it as it was typed
const asked = () => (corrected || window.asked || new URLSearchParams(location.search).get("q") || "").trim();
// Without the marks of a question or of code and without hyphens, and without what Python and fastai put before the message
// of an error: its class, and "Exception occured in `X` when calling event `before_fit`:"
const fastaiPrefix = /^.*Exception occurr?ed in \S+ when calling event \S+\s+/;
const errorClass = /^(?:\w+\.)*\w*(?:Error|Warning|Exception):?\s+(?=\S+\s+\S)/;
const withoutHyphens = (text) => text.replace(/-/g, " ").trim();
const typed = () => withoutHyphens(asked().replace(/[`?"“”]/g, "").replace(fastaiPrefix, "").replace(errorClass, ""));
const lower = (text) => text.toLowerCase();
const letters = (text) => ` ${lower(text).replace(/[^a-z_]+/g, " ").trim()} `;   // no numbers, names end at a blank

// The words of a text without numbers and words that are in every text: "bs=64" is about "bs"
const telling = (text) => lower(text).split(/[:.,]*(?:[\s=]+|$)/).filter((word) => /[a-z]/.test(word) && !stopwords.has(word));

// How well a keyword answers: as it was typed (CLIP is a model, to clip is a verb), in another case, with the same
// telling words, or, if at least two of them were typed, by containing all of them in any order
const answers = (written) => {
  const keyword = withoutHyphens(written);
  const words = telling(typed());
  const known = lower(keyword).split(/\s+/);
  if (keyword === typed()) return 1000;
  if (lower(keyword) === lower(typed())) return 900;
  if (words.length && words.join(" ") === telling(keyword).join(" ")) return 870;
  return words.length > 1 && words.every((word) => known.includes(word)) ? 850 : 0;
};

// How many words of a text are from a message of the package: all of them, or those that its parts begin with, if they are
// at least four, or a whole part of three words ("…" stands for a value between the parts)
const wordsFrom = (message, text) => {
  const contains = (words) => text.includes(` ${words.join(" ")} `);
  if (letters(message).includes(text)) return text.trim().split(" ").length;
  const found = message.split("…").map((part) => {
    const words = letters(part).trim().split(" ");
    const least = words.length === 3 ? 3 : 4;
    while (words.length >= least && !contains(words)) words.pop();
    return words.length >= least ? words.length : 0;
  });
  return found.reduce((a, b) => a + b);
};

// The anchor of the message that most words of the query are from, or undefined. One or two words are no message
const messagePage = "reference/messages";
const messageTyped = () => {
  if (typed().split(/\s+/).length < 3) return undefined;
  const text = letters(typed());
  const [most, key] = said.map(([message, key]) => [wordsFrom(message, text), key]).reduce((a, b) => (b[0] > a[0] ? b : a));
  return most ? key : undefined;
};

// The heading of the section of a page with this anchor
const headingOf = (page, anchor) => {
  const file = Search._index.docnames.indexOf(page);
  const found = Object.entries(Search._index.alltitles).filter(([, places]) => places.some(([n]) => n === file));
  const slug = (heading) => lower(heading).replace(/[^\w -]/g, "").replace(/[ _]/g, "-");
  return found.map(([heading]) => heading).find((heading) => slug(heading) === slug(anchor));
};

const asAWhole = new Set();   // pages that a keyword without an anchor leads to: their links stay at the top of the page

Scorer.score = (result) => {
  const [page, title, anchor, , score] = result;
  let bonus = /^(guides|get_started|about)/.test(page) ? 10 : 0;
  if (/^(changelog|reference\/messages|about\/compared)$/.test(page)) bonus -= 20;
  if (anchor) return score + bonus;
  // Words of the title and of keywords say more about a page than words of its text
  const about = [title, ...(keywords[page] || []).map(([keyword]) => keyword)].map(letters).join("");
  bonus += 5 * telling(typed()).filter((word) => about.includes(` ${word}`)).length;

  let [best, section] = [0, ""];
  for (const [keyword, to] of keywords[page] || [])
    if (answers(keyword) > best) [best, section] = [answers(keyword), to];
  if (best && !section) asAWhole.add(page);
  else asAWhole.delete(page);
  const message = !best && page === messagePage && messageTyped();
  if (message) [best, section] = [800, message];
  if (section) {
    const heading = (headings[page] || {})[section] || headingOf(page, section);
    result[1] = [title, heading].filter((o) => o).join(" > ");
    result[2] = `#${section}`;
  }
  return score + bonus + best;
};

// Sphinx finds pages that have all of the words. If there are none, or the page Messages has the message that was pasted
// but not a number or a name from the reader's machine, the pages with most of the words are found. The page that answers
// is the first.
const findAllWords = Search._performSearch;
const hasAnswer = (found) => found.length > 0 && (!messageTyped() || found.some(([page]) => page === messagePage));
const findMostWords = (query, terms, excluded, ...rest) => {
  const found = findAllWords(query, terms, excluded, ...rest);
  if (hasAnswer(found) || terms.size < 2) return found;
  const pages = new Map();   // page: [its best result, number of its words]
  for (const term of terms) {
    const one = new Set([term]);
    for (const result of findAllWords(term, one, excluded, one, one)) {
      const [best, n] = pages.get(result[0]) || [result, 0];
      pages.set(result[0], [result[4] > best[4] ? result : best, n + 1]);
    }
  }
  const isAnswer = (result) => result[4] > 700;   // a keyword or message gives more than 800, words much less
  const ordered = [...pages.values()].sort(([a, n], [b, m]) =>   // Sphinx shows the last first
    isAnswer(a) - isAnswer(b) || n - m || a[4] - b[4]);
  return ordered.map(([result]) => result);
};

// How many letters to change, leave out, add, or swap with the next one until the word `a` is the word `b`
const typos = (a, b) => {
  const d = [...Array(a.length + 1)].map((_, i) => [i, ...Array(b.length).fill(0)]);
  d[0] = [...Array(b.length + 1).keys()];
  for (let i = 1; i <= a.length; i++)
    for (let j = 1; j <= b.length; j++) {
      const swapped = a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1] ? d[i - 2][j - 2] + 1 : Infinity;
      d[i][j] = Math.min(d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] !== b[j - 1]), swapped);
    }
  return d[a.length][b.length];
};

// The word of a keyword or heading that is nearest to a word with at most two typos, or the word itself
const nearest = (word) => {
  const texts = [...Object.values(keywords).flat().map(([keyword]) => keyword), ...Object.keys(Search._index.alltitles)];
  const known = new Set(texts.flatMap((text) => lower(text).match(/[a-z_]{3,}/g) || []));
  const most = word.length < 4 ? 0 : word.length < 7 ? 1 : 2;
  const near = [...known].filter((o) => o[0] === word[0]).map((o) => [typos(word, o), o]).filter(([n]) => n <= most);
  return near.length ? near.reduce((a, b) => (b[0] < a[0] ? b : a))[1] : word;
};

// Whether no page has a word that begins with this one
const isUnknown = (word) => {
  const stems = [...Search._parseQuery(word)[1]];
  const known = [...Object.keys(Search._index.terms), ...Object.keys(Search._index.titleterms)];
  return stems.length > 0 && !stems.some((stem) => known.some((o) => o.startsWith(stem)));
};

// If no page has all words, the search is repeated without typos, and says so above its results. A page with all of the
// corrected words is better than pages with most words as they were typed.
const oneResult = "Search finished, found one page matching the search query.";
Search._performSearch = (query, terms, excluded, ...rest) => {
  corrected = "";
  Documentation.TRANSLATIONS[oneResult] = ["One result", "${resultCount} results"];
  const all = findAllWords(query, terms, excluded, ...rest);
  if (hasAnswer(all)) return all;
  if (all.length) return findMostWords(query, terms, excluded, ...rest);
  const words = lower(query).split(/\s+/).map((word) => (isUnknown(word) ? nearest(word) : word)).join(" ");
  const [again, newTerms, ...others] = Search._parseQuery(words);
  const repeated = (find) => {
    if (words === lower(query)) return [];
    corrected = words;
    const found = find(again, newTerms, ...others);
    if (!found.length) corrected = "";
    return found;
  };
  let found = repeated(findAllWords);
  if (!found.length) found = findMostWords(query, terms, excluded, ...rest);
  if (!found.length) found = repeated(findMostWords);
  if (!corrected) return found;
  Documentation.TRANSLATIONS[oneResult] = [`One result for “${words}”`, `\${resultCount} results for “${words}”`];
  terms.clear();   // Sphinx marks these words in the summaries
  newTerms.forEach((term) => terms.add(term));
  return found;
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

// What is shown of a page or of its section: the sentence with the most of the words, where the words of the heading above
// it count half. It is the first sentence if the title has all words, or if a keyword has led to the page and no sentence
// has one. If only code has a word, the text above the code is shown. The link leads to the section of what is shown.
const longest = 240;   // characters of a summary
const asText = (element) => element.textContent.replace(/\s+/g, " ").trim();
Search.makeSearchSummary = (html, terms, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  page.querySelectorAll(".headerlink, .viewcode-link, .no-search, script, summary, .admonition-title").forEach((o) => o.remove());
  page.querySelectorAll("br").forEach((element) => element.replaceWith(" "));
  const top = page.querySelector("h1").closest("section");
  const target = anchor && page.getElementById(anchor.slice(1));
  const at = target && (target.closest("tr") || (asText(target) ? target : target.closest("section")));
  const root = at || page.querySelector("[role=main]");
  // Stems of Sphinx end with i where words end with y
  const begins = (term) => new RegExp(`(?<!\\w)${term.replace(/[^\w ]/g, "\\$&").replace(/i$/, "[iy]")}`, "i");
  const words = [...terms].map(begins);
  const found = (text) => words.filter((word) => word.test(text)).length;
  const first = (text) => text.slice(0, longest);
  const headingAbove = (element) => asText(element.closest("section").querySelector("h1, h2, h3, h4"));
  const inSection = (element) => element.closest("section") && element.closest("section") !== top;

  const parts = (selector) => [...root.querySelectorAll(selector)].filter((o) => !o.querySelector("p, li, td, pre"));
  const sentences = (element) => asText(element).split(/(?<=[.!?:]) (?=[A-Z`“(])/).map((_, i, all) => all.slice(i).join(" "));
  const prose = parts("p, li, td, dd").flatMap((o) => sentences(o).map((text) => ({ text, from: o })));
  const shown = prose.filter(({ text }) => text.length > 20);
  const rank = ({ text, from }) => 2 * found(first(text)) + found(headingAbove(from));
  const best = (all, rank) => all.reduce((a, b) => (rank(b) > rank(a) ? b : a), all[0]);
  let it = shown[0] || { text: asText(root), from: root };
  if (at || found(asText(top.querySelector("h1"))) < words.length) {
    it = best(shown, rank) || it;
    const code = !rank(it) && best(parts("pre, dt"), (o) => found(asText(o)));
    const isAbove = ({ from }) => from.closest("section") === code.closest("section")
      && from.compareDocumentPosition(code) & Node.DOCUMENT_POSITION_FOLLOWING;
    if (code && found(asText(code))) it = { text: asText((shown.findLast(isAbove) || it).from), from: code };
  }

  const cut = (text) => (text.length > longest ? `${first(text).replace(/\s+\S*$/, "")} …` : text);
  const summary = document.createElement("p");
  summary.classList.add("context");
  summary.textContent = cut(it.text);
  if (!anchor && inSection(it.from)) queueMicrotask(() => {   // when Sphinx has put the summary below the link
    const link = summary.parentElement.querySelector("a");
    if (asAWhole.has(link.getAttribute("href").replace(/\.html.*/, ""))) {
      if (!found(it.text)) summary.textContent = cut(shown[0].text);   // only code has the words: show how the page begins
      return;
    }
    const address = `${link.getAttribute("href")}#${it.from.closest("section").id}`;
    if (document.querySelector(`.search a[href="${address}"]`)) return;   // another result leads to this section
    link.setAttribute("href", address);
    link.textContent += ` > ${headingAbove(it.from)}`;
  });
  return summary;
};

Documentation.TRANSLATIONS["Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories."] =
  "Your search did not match any page. Try other words, or the FAQ, Messages or the cheat sheet.";
