// Text files that are sent with the next message.

import {at, button, make, showProblem} from "./dom.js";

const MAX_BYTES = 1 << 20, MAX_TOTAL = 3 << 20;  // the server takes requests of 4 MiB
let files = [];

const size = (text) => (text.length < 1024 ? `${text.length} B` : `${Math.round(text.length / 1024)} kB`);
export const labelOf = ({name, text}) => `${name} · ${size(text)}`;

function show() {
  at("attached").hidden = !files.length;
  at("attached").replaceChildren(...files.map((file) => {
    const item = make("li", labelOf(file));
    const drop = () => { files = files.filter((other) => other !== file); show(); at("prompt").focus(); };
    item.append(button("✕", drop, {label: `Remove ${file.name}`, kind: "icon"}));
    return item;
  }));
}

async function textOf(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 1 MiB`);
  try {
    const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* not UTF-8 */ }
  throw new Error(`${file.name} is not a text file in UTF-8`);
}

export async function attach(chosen) {
  for (const file of chosen) {
    try {
      const text = await textOf(file);
      if (files.reduce((sum, other) => sum + other.text.length, text.length) > MAX_TOTAL) {
        throw new Error("the attached files are larger than 3 MiB together");
      }
      files = [...files.filter((other) => other.name !== file.name), {name: file.name, text}];
    } catch (error) { showProblem(error.message); }
  }
  show();
}

export function attached() { return files; }
export function setAttached(kept) {
  files = kept;
  show();
}

// A fence longer than any in the file, so that the file cannot end it.
export function withFiles({content, files: sent = []}) {
  const parts = sent.map(({name, text}) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

export function listenForFiles() {
  at("attach").addEventListener("click", () => at("files").click());
  at("files").addEventListener("change", async () => {
    await attach([...at("files").files]);
    at("files").value = "";
    at("prompt").focus();
  });
  at("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach([...event.clipboardData.files]);
  });
  addEventListener("dragover", (event) => event.preventDefault());  // a file that is dropped would replace the page
  addEventListener("drop", (event) => { event.preventDefault(); attach([...event.dataTransfer.files]); });
}
