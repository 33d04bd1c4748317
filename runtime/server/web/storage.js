// Conversations and settings in this browser's storage. What is read back is checked: other versions of the page, and
// other pages of the same host and port, may have written it.

const SAVED = "mycli.conversations", OPEN = "mycli.open", SETTINGS = "mycli.settings", KEY = "mycli.key";
const MAX_CONVERSATIONS = 200;

const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
const isMessage = (message) =>
  ["user", "assistant"].includes(message?.role) && typeof message.content === "string"
  && (message.files === undefined || (Array.isArray(message.files) && message.files.every(isFile)));
const isConversation = (conversation) =>
  typeof conversation?.id === "string" && Array.isArray(conversation.messages) && conversation.messages.every(isMessage);

export function conversations() {
  try { return JSON.parse(localStorage.getItem(SAVED) ?? "[]").filter(isConversation); } catch { return []; }
}

function store(all) {
  for (let count = Math.min(all.length, MAX_CONVERSATIONS); count >= 0; count--) {  // the oldest go if there is no room
    try {
      localStorage.setItem(SAVED, JSON.stringify(all.slice(0, count)));
      return count === all.length;
    } catch { /* one less */ }
  }
  return false;
}

export const createConversation = () =>
  ({id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", messages: []});

// Returns whether all conversations still fit. A title given in the list stays.
export function keep({id, title, messages}) {
  const all = conversations(), stored = all.find((other) => other.id === id);
  return store([{id, title: stored?.title ?? title, messages}, ...all.filter((other) => other.id !== id)]);
}

export function rename(id, title) {
  store(conversations().map((conversation) => (conversation.id === id ? {...conversation, title} : conversation)));
}

export function remove(id) {
  store(conversations().filter((conversation) => conversation.id !== id));
}

export const titleOf = (conversation) =>
  String(conversation.title || conversation.messages[0]?.content || conversation.messages[0]?.files?.[0]?.name || "Untitled")
    .trim().slice(0, 80);

export function asMarkdown(conversation) {
  const parts = conversation.messages.map(({role, content, files = []}) => {
    const attached = files.map((file) => `*Attached: ${file.name}*\n\n`).join("");
    return `## ${role === "user" ? "You" : "Reply"}\n\n${attached}${content}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${parts.join("\n")}`;
}

// A reload continues with the conversation of its tab.
export const openId = () => sessionStorage.getItem(OPEN);
export function setOpenId(id) {
  if (id) sessionStorage.setItem(OPEN, id);
  else sessionStorage.removeItem(OPEN);
}

export function settings() {
  try { return {...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}")}; } catch { return {}; }
}
export function keepSettings(values) {
  try { localStorage.setItem(SETTINGS, JSON.stringify(values)); } catch { /* they hold until the page is closed */ }
}

// The key lasts as long as the tab, and is not written to disk with the settings.
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const keepApiKey = (key) => sessionStorage.setItem(KEY, key);
