// What a browser keeps of the page: `octavo.local` for all of its tabs, `octavo.tab` for one, and the secret that its chats
// and documents belong to. Stands ahead of everything else on the page.
window.octavo = (() => {
  const passing = () => { // where nothing may be kept, as with cookies blocked: it lasts as long as the page
    const kept = new Map();
    return { getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text) };
  };
  const storage = (name) => {
    try {
      const kept = window[name];
      return {
        getItem: (item) => kept.getItem(item),
        setItem: (item, text) => {
          try {
            kept.setItem(item, text);
          } catch {} // it is full
        },
      };
    } catch {
      return passing();
    }
  };
  const local = storage("localStorage");
  const tab = storage("sessionStorage");

  const SECRET = "octavo-browser";
  let secret = local.getItem(SECRET) || "";
  if (secret.length < SECRET_CHARS || !/^[!-~]{1,200}$/.test(secret)) { // as the server has it
    const bytes = crypto.getRandomValues(new Uint8Array(SECRET_CHARS));
    secret = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    local.setItem(SECRET, secret);
  }
  // Tabs that are opened at the same moment may each make one: the last that was stored is everybody's.
  addEventListener("storage", ({ key }) => {
    if (key === SECRET && (local.getItem(SECRET) || secret) !== secret) location.reload();
  });
  return { local, tab, secret };
})();
