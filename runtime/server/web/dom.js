// Helpers to find and make nodes. Text is always set as text, never as markup.

export const at = (id) => document.getElementById(id);

export function make(tag, text = "", kind = "") {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

export function button(text, act, {label = "", kind = ""} = {}) {
  const node = make("button", text, kind);
  node.type = "button";
  if (label) { node.ariaLabel = label; node.title = label; }
  node.addEventListener("click", act);
  return node;
}

export function download(name, type, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function copy(node, text) {
  const before = node.textContent;
  try {
    await navigator.clipboard.writeText(text);
    node.textContent = "Copied";
  } catch { node.textContent = "Not allowed"; }  // browsers refuse it on plain http from another machine
  setTimeout(() => { node.textContent = before; }, 1500);
}

export function showProblem(text) {
  at("problem").firstElementChild.textContent = text;
  at("problem").hidden = !text;
}
