// The second part of the page's script: what stands at each question and answer, and panels that come from the server.

// ---- buttons at each question and answer. They stand outside the messages, where no answer can put any of its own.
const icons = {
  edit: "M4 16l1-4 8.500-8.500 3 3L8 15z",
  again: "M15.500 8A6 6 0 1 0 16 11.500M16 4v4h-4",
  fork: "M6 4v12M6 10c6 0 8-1 8-6",
  resume: "M6 4.500v11l9-5.500z",
  before: "M12 5l-5 5 5 5",
  after: "M8 5l5 5-5 5",
};

function tool(what, label, turn, words = "") {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "oc-tool";
  button.setAttribute("aria-label", label);
  button.title = label;
  Object.assign(button.dataset, { do: "turn", act: what === "before" || what === "after" ? "branch" : what, turn });
  button.innerHTML = `<svg viewBox="0 0 20 20" aria-hidden="true"><path d="${icons[what]}" fill="none"
    stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/></svg>`;
  button.append(words);
  return button;
}

function toolbar(turn, number, last) {
  const bar = document.createElement("div");
  bar.className = "oc-tools";
  if (turn.of > 1) {
    const branches = document.createElement("span");
    branches.className = "oc-branches";
    const before = tool("before", `Earlier version of question ${number}`, turn.before);
    const after = tool("after", `Later version of question ${number}`, turn.after);
    before.disabled = !turn.before;
    after.disabled = !turn.after;
    branches.append(before, `${turn.at} / ${turn.of}`, after);
    bar.append(branches);
  }
  bar.append(tool("edit", `Edit question ${number}`, turn.id, "Edit question"));
  const again = bar.appendChild(tool("again", `Answer question ${number} again`, turn.id, "Ask again"));
  if (turn.again) again.title += `, ${turn.again}`;
  bar.append(tool("fork", `Go on from answer ${number} in a new chat`, turn.id, "Branch"));
  if (turn.resume && last) {
    bar.append(tool("resume", `Continue answer ${number}`, turn.id, "Continue"));
  }
  if (turn.varied) bar.append(part("span", "oc-varied", "Asked again, sampled"));
  return bar;
}

// ---- where the model looked for an answer: a card a passage, and its quotes with whether they are in the documents
function part(tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

function evidence(turn, number) {
  const box = part("details", "oc-evidence");
  box.dataset.turn = turn.id;
  box.open = opened.has(turn.id);
  const passages = turn.passages.length;
  const found = turn.quotes.filter((quote) => quote.found).length;
  const facts = [];
  if (passages) facts.push(`Looked at ${passages} ${passages === 1 ? "passage" : "passages"}`);
  if (turn.quotes.length) facts.push(`${found} of ${turn.quotes.length} quotes found in the documents`);
  const summary = part("summary", "", facts.join(" \u00b7 "));
  summary.setAttribute("aria-label", `Evidence for answer ${number}: ${summary.textContent}`);
  box.append(summary);
  if (passages) box.append(part("p", "oc-about", "Bars and %: the share of the attention that question and answer gave to the documents."));
  const cards = box.appendChild(part("ol", "oc-passages"));
  turn.passages.forEach((passage, index) => {
    const button = cards.appendChild(document.createElement("li")).appendChild(part("button", "oc-passage"));
    button.type = "button";
    Object.assign(button.dataset, { do: "source", turn: turn.id, value: `p${index}` });
    const share = Math.round(100 * passage.strength);
    const head = button.appendChild(part("span", "oc-passage-head"));
    head.append(part("b", "", passage.place), part("span", "", `${share} %`));
    button.title = `${share} % of the attention that question and answer gave to the documents`;
    const meter = button.appendChild(part("i", "oc-meter"));
    meter.append(part("i", ""));
    meter.firstChild.style.width = `${share}%`;
    const excerpt = button.appendChild(part("span", passage.code ? "oc-excerpt oc-code" : "oc-excerpt"));
    excerpt.append(passage.before, part("mark", "", passage.key), passage.after);
  });
  const quotes = box.appendChild(part("ul", "oc-quotes"));
  for (const quote of turn.quotes) {
    const item = quotes.appendChild(part("li", quote.found ? "oc-found" : "oc-missing"));
    item.append(part("q", "", quote.text), part("span", "", quote.place));
  }
  return box;
}

// ---- quotes within an answer. What is marked is the text as it was drawn: no markup is made of it.
const marks = new WeakMap(); // only these marks open anything, not what an answer may bring along
const OPENING = /["\u201c\u201d\u201e\u00ab]\s*$/;

const lettersOf = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");

function markQuotes(row, turn) {
  const letters = []; // of the answer: [letter, its text node, its place in that]
  const nodes = document.createTreeWalker(row, NodeFilter.SHOW_TEXT, {
    acceptNode: (node) => (node.parentElement.closest(".prose") && !node.parentElement.closest("pre, .katex, .oc-note"))
      ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT,
  });
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    for (let at = 0; at < node.data.length; ) {
      const one = String.fromCodePoint(node.data.codePointAt(at));
      for (const letter of lettersOf(one)) letters.push([letter, node, at, one.length]);
      at += one.length;
    }
  }
  const stream = letters.map(([letter]) => letter).join("");
  const offsets = letters.map(((sum) => ([letter]) => (sum += letter.length) - letter.length)(0));
  const found = [];
  turn.quotes.forEach((quote, index) => {
    const wanted = lettersOf(quote.text);
    for (let at = stream.indexOf(wanted); wanted && at >= 0; at = stream.indexOf(wanted, at + wanted.length)) {
      const begin = offsets.indexOf(at);
      const end = offsets.findIndex((offset) => offset >= at + wanted.length);
      const inside = letters.slice(begin, end < 0 ? undefined : end);
      if (begin >= 0 && isQuoted(row, inside[0])) found.push({ quote, index, inside, begin, end: begin + inside.length });
    }
  });
  let free = Infinity; // from the last to the first: a mark splits the text behind its beginning
  for (const { quote, index, inside, begin, end } of found.sort((a, b) => b.begin - a.begin)) {
    if (end > free) continue;
    markOne(turn, quote, index, inside);
    free = begin;
  }
}

function isQuoted(row, [, node, at]) {
  if (node.parentElement.closest("blockquote")) return true;
  const range = document.createRange();
  range.setStart(node.parentElement.closest("p, li, td, th, h1, h2, h3, h4, h5, h6") || row, 0);
  range.setEnd(node, at);
  return OPENING.test(range.toString());
}

function markOne(turn, quote, index, inside) {
  const runs = new Map(); // the stretch of each text node
  for (const [, node, at, length] of inside) {
    const run = runs.get(node) || { low: at };
    runs.set(node, { ...run, high: at + length });
  }
  const where = quote.found ? `Found in ${quote.place}` : "Not found in the documents";
  const pieces = [...runs].map(([node, { low, high }], at) => {
    const range = document.createRange();
    range.setStart(node, at ? 0 : low); // with the spaces between one stretch and the next
    range.setEnd(node, at < runs.size - 1 ? node.length : high);
    const mark = part("span", `oc-quote ${quote.found ? "oc-found" : "oc-missing"}`);
    mark.title = where;
    range.surroundContents(mark);
    if (quote.found) marks.set(mark, () => act("source", turn.id, `q${index}`));
    return mark;
  });
  pieces.at(-1).append(part("span", "oc-unseen", ` (${where})`));
  if (quote.found) Object.assign(pieces[0], { tabIndex: 0, role: "button" });
}

addEventListener("click", (event) => marks.get(event.target.closest?.(".oc-quote"))?.());
addEventListener("keydown", (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  const open = marks.get(event.target);
  if (open) event.preventDefault();
  open?.();
});

// A source that is open stands beside the page where there is room, so that the answer and its cards stay in sight;
// the card that it was opened from is marked.
function beside() {
  const open = find("#oc-source:popover-open") && !narrow.matches;
  if (open) document.body.dataset.source = "beside";
  else delete document.body.dataset.source;
  const shown = find("#oc-source:popover-open [data-do=source]")?.dataset; // a button that turns its pages
  for (const card of document.querySelectorAll(".oc-passage")) {
    const own = shown?.turn === card.dataset.turn && shown.value.split(":")[0] === card.dataset.value;
    if (own) card.setAttribute("aria-current", "true");
    else card.removeAttribute("aria-current");
  }
}
addEventListener("toggle", ({ target }) => target.id === "oc-source" && beside(), true);
narrow.addEventListener("change", beside);

function openFresh() {
  const dialog = find("[popover][data-fresh]");
  if (!dialog) return;
  delete dialog.dataset.fresh;
  dialog.querySelector("form")?.reset(); // to what is in force, whatever was typed there and refused or given up
  dialog.showPopover();
  const mark = dialog.querySelector("mark");
  if (!mark) return;
  mark.scrollIntoView({ block: "center" });
  mark.focus({ preventScroll: true });
}

// The chat component draws its rows when it likes: whatever row lacks its buttons gets them.
let facts = "";
let turns = [];
let first = 0; // number of the first turn that is shown
const opened = new Set(); // turns whose evidence is open, for when it is drawn anew
addEventListener(
  "toggle",
  ({ target }) => {
    if (target.matches?.(".oc-evidence")) opened[target.open ? "add" : "delete"](target.dataset.turn);
  },
  true,
);
function decorate() {
  const given = find("#oc-turns [data-turns]");
  if (given && given.dataset.turns !== facts) {
    facts = given.dataset.turns;
    const all = JSON.parse(facts);
    turns = all.map((turn, at) => ({ ...turn, key: JSON.stringify([at, at === all.length - 1, turn]) }));
    first = Number(given.dataset.first);
    moveTo(given.dataset.chat);
  }
  const rows = [...document.querySelectorAll("#oc-chat .bot-row")];
  rows.forEach((row, at) => {
    const place = placeAt(row);
    place.toggleAttribute("data-live", Boolean(turns[at]?.live));
    // Looked through once for each state of its text; where nothing could be marked there is nothing to look for again.
    if (turns[at]?.quotes.length && !turns[at].live && !row.querySelector(".oc-quote")) {
      const text = `${turns[at].id} ${row.textContent.length}`;
      if (row.octavoRead !== text) markQuotes(row, turns[at]);
      row.octavoRead = `${turns[at].id} ${row.textContent.length}`;
    }
    if (place.octavo && place.octavo.key === turns[at]?.key && place.octavo.bar.isConnected) return;
    for (const bar of place.querySelectorAll(":scope > :is(.oc-tools, .oc-evidence)")) bar.remove();
    place.octavo = null;
    if (!turns[at] || turns[at].live) return;
    const number = first + at + 1;
    const bar = toolbar(turns[at], number, at === turns.length - 1);
    place.append(bar);
    place.octavo = { key: turns[at].key, bar };
    place.toggleAttribute("data-tools", true);
    const shown = turns[at].passages.length || turns[at].quotes.length;
    place.toggleAttribute("data-evidence", Boolean(shown));
    if (shown) place.append(evidence(turns[at], number));
  });
  const begins = find("#oc-chat .oc-memory")?.closest(".message-row");
  let forgotten = Boolean(begins);
  for (const row of begins || find("#oc-chat [data-forgotten]") ? document.querySelectorAll("#oc-chat .message-row") : []) {
    if (row === begins) forgotten = false;
    row.toggleAttribute("data-forgotten", forgotten);
  }
  document.body.toggleAttribute("data-documents", Boolean(find("#oc-shelf .oc-card")));
  earlier();
  follow();
}

function placeAt(row) {
  const next = row.nextElementSibling;
  return next?.matches(".message-buttons") ? next : row;
}

function earlier() {
  const wrap = find("#oc-chat .bubble-wrap");
  let button = wrap?.querySelector(":scope > .oc-earlier-turns");
  if (!wrap || (first === 0) === !button) return;
  if (first === 0) return button.remove();
  button = part("button", "oc-quiet oc-earlier-turns", "Show earlier questions");
  button.type = "button";
  button.dataset.do = "older";
  wrap.prepend(button);
}

// ---- where the conversation is scrolled to: its end, also while it grows, until the reader scrolls up
let following = true;
let chatShown = "";
let lastTop = 0;
let held = null; // where the reader was before the answer got shorter for a moment, as it does while it is drawn anew
let fromEnd = null; // while earlier turns are put before what is read: how far from the end that is
function moveTo(chat) {
  if (chat === chatShown) return;
  chatShown = chat;
  following = true;
  held = null;
  fromEnd = null;
}
const growth = new ResizeObserver(() => follow()); // what comes into sight may be of another height than was thought
let grows = null;
function follow() {
  const wrap = find("#oc-chat .bubble-wrap");
  if (!wrap) return;
  const content = wrap.querySelector(".message-wrap");
  if (content && content !== grows) {
    growth.disconnect();
    growth.observe((grows = content));
    growth.observe(wrap);
  }
  if (fromEnd !== null) wrap.scrollTop = wrap.scrollHeight - fromEnd;
  else if (following) wrap.scrollTop = wrap.scrollHeight;
  else if (held !== null && held <= wrap.scrollHeight - wrap.clientHeight) wrap.scrollTop = held;
  below(wrap);
}
// The component looks whether there is more below when somebody scrolls; an answer can also get shorter, or be another.
function below(wrap) {
  const more = wrap.scrollHeight - wrap.clientHeight - wrap.scrollTop > 100;
  document.body.toggleAttribute("data-below", more);
}
addEventListener(
  "scroll",
  ({ target }) => {
    if (!target.matches?.("#oc-chat .bubble-wrap")) return;
    const left = target.scrollHeight - target.clientHeight - target.scrollTop;
    const back = target.scrollTop < lastTop;
    if (back && left <= 4) held ??= lastTop; // nobody scrolls up to the end: it came here by getting shorter
    else {
      if (back) following = false;
      else if (left < 120) following = true; // it may have grown since the reader came to its end
      held = null;
    }
    lastTop = target.scrollTop;
    below(target);
  },
  true,
);
actions.older = () => {
  const wrap = find("#oc-chat .bubble-wrap");
  following = false;
  fromEnd = wrap.scrollHeight - wrap.scrollTop;
  setTimeout(() => (fromEnd = null), 1000);
  act("older");
};

// What the engine does is drawn anew while it works: the panel stays open over that.
let watching = false;
addEventListener(
  "beforetoggle",
  (event) => {
    if (event.target.id === "oc-engine") watching = event.newState === "open";
  },
  true,
);
let closely = false; // whether its settings and kernels are shown too
addEventListener(
  "toggle",
  ({ target }) => {
    if (target.matches?.("#oc-engine details") && target.checkVisibility()) closely = target.open;
  },
  true,
);
function watchOn() {
  const panel = watching && find("#oc-engine");
  if (panel && !panel.matches(":popover-open")) panel.showPopover();
  if (panel && panel.querySelector("details").open !== closely) panel.querySelector("details").open = closely;
}

// The self-test stands below the fold of most screens: its beginning, first rows and result are scrolled into sight.
let tested = "";
function showTest() {
  const test = find("#oc-depths");
  const before = tested;
  tested = test?.querySelector("p, td")
    ? [find("#oc-self-test-stop")?.checkVisibility(), Boolean(test.querySelector("td"))].join() : "";
  if (tested && tested !== before && test.checkVisibility()) test.scrollIntoView({ block: "nearest" });
}

// ---- for those who hear the page: what it does, told once, not with every token
const told = document.body.appendChild(part("div", "oc-unseen"));
told.setAttribute("role", "status");
const SAID = {
  loading: "The model is loading.", queued: "Your question waits in line.", opening: "Opening what was read.",
  reading: "Reading the documents.", answering: "The answer is being written.", stopping: "Stopping.",
};
let toldOf = "";
function tell() {
  const now = find("#oc-strip [data-state]")?.dataset.state || "";
  if (now === toldOf) return;
  const ended = toldOf === "answering" && now !== "stopping";
  toldOf = now;
  told.textContent = ended ? "The answer is there." : SAID[now] || "";
}

let due = 0;
new MutationObserver(() => {
  due ||= setTimeout(() => {
    due = 0;
    decorate();
    openFresh();
    beside();
    watchOn();
    watchEdit();
    tell();
    showTest();
    if (!answering()) waiting.remove();
  }, 0);
}).observe(document.body, {
  // HTML that comes anew may change no more than an attribute of what is there
  childList: true, subtree: true, characterData: true, attributeFilter: ["data-fresh", "data-turns", "data-state"],
});
