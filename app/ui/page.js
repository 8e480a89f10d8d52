// Runs once, as the script of the header. What the page's own buttons, drops and pastes ask for is
// reported with trigger() under the names 'fresh', 'added', 'removed', 'paged', 'suggested' and 'acted'.

const PASTE_LIMIT = 4000; // characters; longer pastes become a document

const find = (selector) => document.querySelector(selector);
const box = () => find("#oc-question textarea");

// ---- light and dark: as the system says, until the person says otherwise
const chosen = octavo.local.getItem("octavo-theme");
if (chosen) document.body.classList.toggle("dark", chosen === "dark");

// ---- files
const picker = document.createElement("input");
picker.type = "file";
picker.multiple = true;
picker.id = "oc-picker";
picker.setAttribute("aria-label", "Documents to add");
picker.tabIndex = -1;
document.body.append(picker);
picker.addEventListener("change", () => {
  send([...picker.files]);
  picker.value = "";
});

const arriving = document.createElement("ul");
arriving.id = "oc-arriving";
arriving.className = "oc-shelf";
arriving.setAttribute("aria-label", "Files on their way");

function card(name) {
  const item = document.createElement("li");
  item.className = "oc-card oc-busy";
  const title = item.appendChild(document.createElement("div"));
  title.className = "oc-name";
  title.textContent = title.title = name;
  const facts = item.appendChild(document.createElement("div"));
  facts.className = "oc-facts";
  facts.textContent = "Uploading";
  arriving.append(item);
  return { item, say: (text) => (facts.textContent = text) };
}

function put(file, say) {
  return new Promise((resolve, reject) => {
    // The server checks too, but a browser may hang when it is refused in the middle of a large body.
    const limit = Number(element.querySelector("[data-max-bytes]").dataset.maxBytes);
    if (file.size > limit) {
      reject(`${file.name} is larger than ${Math.round(limit / 2 ** 20)} MiB, the limit for one file. Split it.`);
      return;
    }
    const request = new XMLHttpRequest();
    request.open("PUT", "uploads");
    request.setRequestHeader("X-File-Name", encodeURIComponent(file.name));
    request.upload.onprogress = (event) => {
      if (event.lengthComputable) say(`Uploading, ${Math.floor((100 * event.loaded) / event.total)} %`);
    };
    request.onerror = () => reject("The upload broke off: the file is too large or the server is gone.");
    request.onload = () => {
      let answer = {};
      try {
        answer = JSON.parse(request.responseText);
      } catch {}
      if (request.status === 200) resolve(answer.id);
      else reject(answer.error || `The upload failed (${request.status}).`);
    };
    request.send(file.form || file);
  });
}

// ---- folders: one upload, a form whose files have their paths for names
const TOOL_FOLDERS = new Set([".git", "node_modules", "__pycache__", ".venv", "venv"]); // large, and never read

const done = (start) => new Promise((resolve, reject) => start(resolve, reject));

async function gather(folder, found = [], path = "") {
  const reader = folder.createReader();
  for (;;) {
    const entries = await done((yes, no) => reader.readEntries(yes, no)); // a hundred at a time
    if (!entries.length) return found;
    for (const entry of entries) {
      if (entry.isFile) found.push([path + entry.name, await done((yes, no) => entry.file(yes, no))]);
      else if (!TOOL_FOLDERS.has(entry.name)) await gather(entry, found, `${path}${entry.name}/`);
    }
  }
}

async function whole(folder) {
  const form = new FormData();
  let size = 0;
  for (const [path, file] of await gather(folder)) {
    form.append("file", file, path);
    size += file.size;
  }
  return { name: folder.name, size, form };
}

async function sendDropped(transfer) {
  // What was dropped is gone after the event: entries are taken at once, then read.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry?.isDirectory);
  const folders = new Set(entries.map((entry) => entry.name));
  const files = [...transfer.files].filter((file) => !folders.has(file.name));
  await send(files);
  for (const entry of entries) {
    try {
      await send([await whole(entry)]);
    } catch (problem) {
      find("#oc-composer").prepend(arriving);
      refuse(card(entry.name), `${entry.name} could not be read: ${problem.message || problem}.`);
    }
  }
}

function refuse({ item, say }, problem) {
  item.className = "oc-card oc-bad";
  say(String(problem));
  setTimeout(() => item.remove(), 12000);
}

async function send(files) {
  if (!files.length) return;
  find("#oc-composer").prepend(arriving);
  for (const file of files) {
    const place = card(file.name);
    try {
      const id = await put(file, place.say);
      trigger("added", { files: [{ id, name: file.name }] });
      place.item.remove();
    } catch (problem) {
      refuse(place, problem);
    }
  }
}

let depth = 0; // dragenter and dragleave also fire for every child
const dragging = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
addEventListener("dragenter", (event) => {
  if (dragging(event) && ++depth) document.body.classList.add("oc-dropping");
});
addEventListener("dragleave", (event) => {
  if (dragging(event) && --depth <= 0) document.body.classList.remove("oc-dropping");
});
addEventListener("dragover", (event) => dragging(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!dragging(event)) return;
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("oc-dropping");
  sendDropped(event.dataTransfer);
});

addEventListener(
  "paste",
  (event) => {
    const files = [...(event.clipboardData?.files || [])];
    const text = event.clipboardData?.getData("text/plain") || "";
    if (!files.length && text.length <= PASTE_LIMIT) return;
    event.preventDefault();
    event.stopPropagation();
    send(files.length ? files : [new File([text], "Pasted text.txt", { type: "text/plain" })]);
  },
  true,
);

// ---- buttons of the page's own HTML
function write(text) {
  const area = box();
  Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(area, text);
  area.dispatchEvent(new Event("input", { bubbles: true }));
  area.focus();
}

const actions = {
  add: () => picker.click(),
  fresh: () => {
    leave();
    trigger("fresh");
    box()?.focus();
  },
  theme: () => {
    const dark = document.body.classList.toggle("dark");
    octavo.local.setItem("octavo-theme", dark ? "dark" : "light");
  },
  suggest: () => trigger("suggested"),
  remove: (button) => trigger("removed", { id: idOf(button) }),
  earlier: (button) => act("earlier", idOf(button)),
  side: () => side(document.body.dataset.side === "closed", true),
  open: (button) => {
    leave();
    act("open", idOf(button));
    if (narrow.matches) side(false);
  },
  use: (button) => {
    act("use", idOf(button));
    if (narrow.matches) side(false);
  },
  rename: (button) => rename(button.closest(".oc-item")),
  export: (button) => save(button.closest(".oc-item"), button.dataset.kind),
  delete: (button) => {
    if (!confirm(`Delete this chat?\n\n${titleOf(button)}`)) return;
    if (button.closest(".oc-item").querySelector("[aria-current]")) leave();
    act("delete", idOf(button));
  },
  pin: (button) => act("pin", idOf(button), button.dataset.pinned === "true" ? "false" : "true"),
  forget: (button) => {
    const kept = button.dataset.pinned === "true" ? " You asked to keep it whatever the quota." : "";
    if (confirm(`Remove ${titleOf(button)} from the library?${kept}`)) act("forget", idOf(button));
  },
  unedit: () => {
    act("unedit");
    giveBack();
  },
  turn: (button) => {
    if (button.dataset.act === "fork") leave();
    if (button.dataset.act === "edit") {
      if (answering()) return; // which the server would not do either
      if (unsent === null || editing === "over") [unsent, editedIn, editing] = [drafts(), chatNow(), "begun"];
      box().focus();
    }
    act(button.dataset.act, button.dataset.turn);
  },
};
const UNSENT = "octavo-unsent";
// What stood in the question box before a question was edited there, null once it stands there again; the edit's chat,
// and whether it is "begun", "shown" or "over": what is typed then is another question.
let [unsent, editedIn, editing] = JSON.parse(octavo.tab.getItem(UNSENT) || "[null]");
if (editing === "begun") editing = "shown";
const chatNow = () => find("#oc-turns [data-chat]")?.dataset.chat;
const drafts = () => [unsent, box().value].filter(Boolean).join("\n\n");
function giveBack() {
  if (unsent === null) return; // it stands there, or what was typed since
  const draft = editing === "over" ? drafts() : unsent;
  unsent = null;
  if (draft !== box().value) write(draft);
}
function watchEdit() {
  if (unsent === null || !find("#oc-strip [data-state]:not([data-state=unknown])") || !chatNow()) return;
  if (chatNow() !== editedIn) return giveBack(); // it was deleted in another tab
  if (find("[data-do=unedit]")) editing = "shown";
  else if (editing === "shown") editing = "over";
  if (editing === "over" && !box().value) giveBack();
}
// The tab goes to another chat: what belongs to this one does not follow.
function leave() {
  for (const refused of arriving.querySelectorAll(".oc-bad")) refused.remove();
  if (unsent === null) return;
  act("unedit");
  giveBack();
}

actions.options = () => act("options");
actions.preset = (button) => {
  const form = button.closest("form");
  for (const [name, value] of Object.entries(JSON.parse(button.dataset.values))) form.elements[name].value = value;
  for (const other of form.querySelectorAll(".oc-preset")) other.setAttribute("aria-pressed", String(other === button));
};

addEventListener("submit", (event) => {
  const form = event.target.closest?.("#oc-options form");
  if (!form) return;
  event.preventDefault();
  act("keep", "", JSON.stringify(Object.fromEntries(new FormData(form))));
  form.closest("[popover]").hidePopover();
});

actions.source = (button) => act("source", button.dataset.turn, button.dataset.value);

function act(what, id = "", value = "") {
  trigger("acted", { do: what, id, value });
}

const titleOf = (part) => part.closest(".oc-item").querySelector(".oc-open span").textContent;
const idOf = (part) => part.closest("[data-id]").dataset.id;

// ---- the panel with chats and library: beside the conversation where there is room, else over it
const narrow = matchMedia("(max-width: 70rem)");

function side(open, remember = false) {
  document.body.dataset.side = !open ? "closed" : narrow.matches ? "over" : "beside";
  if (remember && !narrow.matches) octavo.local.setItem("octavo-side", open ? "open" : "closed");
  const panel = find("#oc-side");
  if (panel) panel.inert = !open;
}
side(!narrow.matches && octavo.local.getItem("octavo-side") !== "closed");
narrow.addEventListener("change", () => side(!narrow.matches && octavo.local.getItem("octavo-side") !== "closed"));

function rename(item) {
  const [id, before] = [item.dataset.id, [...item.childNodes]]; // the list may be drawn anew meanwhile
  const field = document.createElement("input");
  field.className = "oc-search";
  field.setAttribute("aria-label", "New title");
  field.value = item.querySelector(".oc-open span").textContent;
  item.replaceChildren(field);
  field.select();
  let done = false;
  const end = (keep) => {
    if (done) return;
    done = true;
    if (field.isConnected) item.replaceChildren(...before);
    const title = field.value.trim();
    if (!keep || !title) return;
    before[0].querySelector("span").lastChild.data = title; // until the list comes with what the disk has taken
    act("rename", id, title);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") end(false);
  });
  field.addEventListener("blur", () => end(true));
}

async function save(item, kind) {
  const answer = await fetch(`exports/${item.dataset.id}.${kind}`, {
    headers: { "X-Octavo-Browser": octavo.secret },
  });
  if (!answer.ok) {
    alert(`The chat could not be saved: ${(await answer.json().catch(() => ({}))).error || answer.status}`);
    return;
  }
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  const title = titleOf(item).replace(/[^\p{L}\p{N} .-]+/gu, " ").replace(/[ .]+$/, "").trim();
  link.download = `${title || "chat"}.${kind}`;
  link.click();
  URL.revokeObjectURL(link.href);
}

let searching = 0;
addEventListener("input", (event) => {
  if (!event.target.matches?.("[data-search]")) return;
  clearTimeout(searching);
  searching = setTimeout(() => act("search", "", event.target.value), 200);
});

// A menu of the panel closes when something of it, or anything outside it, is pressed.
addEventListener("click", ({ target }) => {
  for (const menu of document.querySelectorAll(".oc-more[open]"))
    if (!menu.contains(target) || target.closest("button")) menu.open = false;
});

// A list may be drawn anew while a button of it is held down, and then the button stands for something else, or another
// one is in its place: what was pressed counts.
let pressed = null;
const buttonAt = (target) => target?.closest?.("[data-do], [data-example]");
const saidBy = (button) => button && JSON.stringify([{ ...button.dataset }, button.closest("[data-id]")?.dataset.id]);
addEventListener("pointerdown", (event) => {
  const button = event.button === 0 ? buttonAt(event.target) : null;
  pressed = { button, said: saidBy(button) };
}, true);
addEventListener("pointerup", ({ clientX, clientY }) => {
  const now = buttonAt(document.elementFromPoint(clientX, clientY));
  if (now && pressed?.button?.isConnected === false && saidBy(now) === pressed.said) now.click();
}, true);

addEventListener("click", (event) => {
  const button = buttonAt(event.target);
  if (!button || button.closest("#oc-chat .message")) return; // markup in an answer presses no buttons
  if (event.pointerType && pressed && saidBy(button) !== pressed.said) return;
  if (button.dataset.do) actions[button.dataset.do]?.(button);
  else write(button.textContent.trim());
});

addEventListener("change", (event) => {
  const field = event.target.closest?.("#oc-shelf [data-page]");
  if (!field) return;
  const holder = field.closest("[data-id]");
  const value = (which) => holder.querySelector(`[data-page=${which}]`).value;
  trigger("paged", { id: holder.dataset.id, first: value("first"), last: value("last") });
});

// A share outside 0 to 1 is told in its place, by the browser; the library would answer it with an error of the server.
addEventListener("input", (event) => {
  if (!event.target.matches?.("#oc-heads-ratio input[type=number]") || event.target.reportValidity()) return;
  event.stopImmediatePropagation();
}, true);

// ---- a question that is sent while an answer is written stays in its box, and the person is told why
const waiting = document.createElement("p");
waiting.id = "oc-held";
const answering = () => find("#oc-question .stop-button");
function hold() {
  waiting.textContent = told.textContent =
    "This chat is still answering. Your question stays here: send it when the answer has ended, or press Stop first.";
  find("#oc-composer").prepend(waiting);
}

// ---- keys: Enter sends and Shift+Enter breaks the line (the text box does that), Escape stops
addEventListener(
  "keydown",
  (event) => {
    if (event.isComposing) event.stopPropagation(); // Enter ends a composed word, it does not send
    else if (event.key === "Escape") {
      const read = find("#oc-source:popover-open"); // stands beside the page, which is used on meanwhile
      if (read && !find(":popover-open:not(#oc-source)")) return read.hidePopover();
      const heads = find("#oc-heads > .label-wrap.open");
      if (heads && !find(":popover-open")) return heads.click();
      const menu = find(".oc-more[open]");
      if (menu) {
        menu.open = false;
        return menu.querySelector("summary").focus();
      }
      // A panel that is open, or a field that is typed in, takes the key for itself.
      const field = event.target.matches?.("input, textarea, select") && event.target !== box();
      if (field || find(":popover-open")) return;
      if (document.body.dataset.side === "over") side(false);
      else (answering() || find("[data-do=unedit]"))?.click();
    }
    else if (event.key === "Enter" && event.target.matches?.("[data-page]")) event.target.blur();
    else if (event.key === "Enter" && !event.shiftKey && event.target === box() && answering()) {
      if (box().value.trim()) hold();
    }
  },
  true,
);

// ---- a connection that is lost. What was heard last says whether it lives: the library notices when a connection is cut
// and loads the page again when the server is back; a dead one that nobody cut is noticed here. The server goes on, so all
// that could be lost is what is being typed.
const DRAFT = "octavo-draft";
let leaving = false;
addEventListener("beforeunload", () => {
  leaving = true;
  octavo.tab.setItem(DRAFT, box()?.value || "");
  octavo.tab.setItem(UNSENT, JSON.stringify([unsent, editedIn, editing]));
});
// The library tells of each connection that ends with its page as of an error, before anyone else knows that it ends.
const complain = console.error;
console.error = (...said) => setTimeout(() => leaving || complain(...said), 0);
const restoring = setInterval(() => {
  if (!box()) return;
  clearInterval(restoring);
  const kept = octavo.tab.getItem(DRAFT);
  if (kept && !box().value) write(kept);
}, 50);

const CONNECTIONS = 6; // that browsers open to one server at most
let silences = 0; // one may be a machine that has slept
setInterval(async () => {
  const quiet = 1000 * Number(find("[data-quiet-s]").dataset.quietS);
  silences = window.octavoPulse && Date.now() - window.octavoPulse > quiet ? silences + 1 : 0;
  if (silences < 2) return;
  // Asked over every connection at once: those that wait to be used again may be as dead, and a reload over one of them
  // would never end. One that does not answer in time is let go of.
  const signal = AbortSignal.timeout(5000);
  const asks = Array.from({ length: CONNECTIONS }, (_, at) =>
    fetch(`gradio_api/app_id?${at}`, { cache: "no-store", signal }).then((answer) => answer.ok, () => false));
  if ((await Promise.all(asks)).includes(true)) location.reload();
}, 3000);
