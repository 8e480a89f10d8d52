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

function tool(what, label, turn) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "oc-tool";
  button.setAttribute("aria-label", label);
  button.title = label;
  Object.assign(button.dataset, { do: "turn", act: what === "before" || what === "after" ? "branch" : what, turn });
  button.innerHTML = `<svg viewBox="0 0 20 20" aria-hidden="true"><path d="${icons[what]}" fill="none"
    stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/></svg>`;
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
  bar.append(tool("edit", `Edit question ${number}`, turn.id), tool("again", `Answer question ${number} again`, turn.id));
  bar.append(tool("fork", `Go on from answer ${number} in a new chat`, turn.id));
  if (turn.resume && last) {
    const go = tool("resume", `Continue answer ${number}`, turn.id);
    go.append("Continue");
    bar.append(go);
  }
  return bar;
}

// ---- what an answer rests on: a card a passage, and its quotes with whether they are in the documents
function part(tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

const placeOf = (item) => `${item.name}, page ${item.page}` + (item.line ? `, line ${item.line}` : "");

function evidence(turn, number) {
  const box = part("details", "oc-evidence");
  box.dataset.turn = turn.id;
  const passages = turn.passages.length;
  const found = turn.quotes.filter((quote) => quote.name).length;
  const facts = [];
  if (passages) facts.push(`Rests on ${passages} ${passages === 1 ? "passage" : "passages"}`);
  if (turn.quotes.length) facts.push(`${found} of ${turn.quotes.length} quotes found in the documents`);
  const summary = part("summary", "", facts.join(" \u00b7 "));
  summary.setAttribute("aria-label", `Evidence for answer ${number}: ${summary.textContent}`);
  box.append(summary);
  const cards = box.appendChild(part("ol", "oc-passages"));
  turn.passages.forEach((passage, index) => {
    const button = cards.appendChild(document.createElement("li")).appendChild(part("button", "oc-passage"));
    button.type = "button";
    Object.assign(button.dataset, { do: "source", turn: turn.id, value: String(index) });
    const share = Math.round(100 * passage.strength);
    const head = button.appendChild(part("span", "oc-passage-head"));
    head.append(part("b", "", placeOf(passage)), part("span", "", `${share} %`));
    head.title = `${share} % of what the answer looked at in the documents`;
    const meter = button.appendChild(part("i", "oc-meter"));
    meter.append(part("i", ""));
    meter.firstChild.style.width = `${share}%`;
    button.append(part("span", "oc-excerpt", passage.excerpt));
  });
  const quotes = box.appendChild(part("ul", "oc-quotes"));
  for (const quote of turn.quotes) {
    const item = quotes.appendChild(part("li", quote.name ? "oc-found" : "oc-missing"));
    item.append(part("q", "", quote.text), part("span", "", quote.name ? placeOf(quote) : "not in the documents"));
  }
  return box;
}

function openFresh() {
  const dialog = find("[popover][data-fresh]");
  if (!dialog) return;
  delete dialog.dataset.fresh;
  dialog.showPopover();
  const mark = dialog.querySelector("mark");
  if (!mark) return;
  mark.scrollIntoView({ block: "center" });
  mark.focus({ preventScroll: true });
}

// The chat component draws its rows when it likes: whatever row lacks its buttons gets them.
let drawn = "";
let turns = [];
let opened = new Set(); // turns whose evidence was open when it was last drawn anew
function decorate() {
  const facts = find("#oc-turns [data-turns]")?.dataset.turns || "[]";
  if (facts !== drawn) {
    opened = new Set([...document.querySelectorAll("#oc-chat .oc-evidence[open]")].map((box) => box.dataset.turn));
    for (const bar of document.querySelectorAll("#oc-chat :is(.oc-tools, .oc-evidence)")) bar.remove();
    drawn = facts;
    turns = JSON.parse(facts);
  }
  document.querySelectorAll("#oc-chat .bot-row").forEach((row, at) => {
    const next = row.nextElementSibling;
    const place = next?.matches(".message-buttons") ? next : row;
    if (!turns[at] || turns[at].live || place.querySelector(":scope > .oc-tools")) return;
    place.append(toolbar(turns[at], at + 1, at === turns.length - 1));
    if (!turns[at].passages.length && !turns[at].quotes.length) return;
    const box = evidence(turns[at], at + 1);
    box.open = opened.has(turns[at].id);
    place.append(box);
  });
}

// What the engine does is drawn anew while it works: the panel stays open over that.
let watching = false;
addEventListener(
  "beforetoggle",
  (event) => {
    if (event.target.id === "oc-engine") watching = event.newState === "open";
  },
  true,
);
function watchOn() {
  const panel = watching && find("#oc-engine");
  if (panel && !panel.matches(":popover-open")) panel.showPopover();
}

new MutationObserver(() => {
  decorate();
  openFresh();
  watchOn();
}).observe(document.body, { childList: true, subtree: true });
