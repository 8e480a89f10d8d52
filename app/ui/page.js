// Runs once, as the script of the header. What the page's own buttons, drops and pastes ask for is
// reported with trigger() under the names 'fresh', 'added', 'removed', 'paged' and 'suggested'.

const PASTE_LIMIT = 4000; // characters; longer pastes become a document

const find = (selector) => document.querySelector(selector);
const box = () => find("#oc-question textarea");

// ---- light and dark: as the system says, until the person says otherwise
const chosen = localStorage.getItem("octavo-theme");
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
    request.send(file);
  });
}

async function send(files) {
  if (!files.length) return;
  find("#oc-composer").prepend(arriving);
  for (const file of files) {
    const { item, say } = card(file.name);
    try {
      const id = await put(file, say);
      trigger("added", { files: [{ id, name: file.name }] });
      item.remove();
    } catch (problem) {
      item.className = "oc-card oc-bad";
      say(String(problem));
      setTimeout(() => item.remove(), 12000);
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
  send([...event.dataTransfer.files]);
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
    trigger("fresh");
    box()?.focus();
  },
  theme: () => {
    const dark = document.body.classList.toggle("dark");
    localStorage.setItem("octavo-theme", dark ? "dark" : "light");
  },
  suggest: () => trigger("suggested"),
  remove: (button) => trigger("removed", { id: button.closest("[data-id]").dataset.id }),
};

addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-do], [data-example]");
  if (!button || button.closest("#oc-chat")) return; // markup in an answer presses no buttons
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

// ---- keys: Enter sends and Shift+Enter breaks the line (the text box does that), Escape stops
addEventListener(
  "keydown",
  (event) => {
    if (event.isComposing) event.stopPropagation(); // Enter ends a composed word, it does not send
    else if (event.key === "Escape") find("#oc-question .stop-button")?.click();
    else if (event.key === "Enter" && event.target.matches?.("[data-page]")) event.target.blur();
  },
  true,
);
