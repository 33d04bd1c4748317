// The list of conversations: open, rename, export, delete.

import {at, button, download, make} from "./dom.js";
import {asMarkdown, conversations, remove, rename, titleOf} from "./storage.js";

const fileName = (conversation) => titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

export function openSide(open) {
  const drawer = at("open-side").offsetParent !== null;  // on a wide screen the list is always shown
  document.body.classList.toggle("listing", open && drawer);
  at("shade").hidden = !(open && drawer);
  at("open-side").ariaExpanded = String(open && drawer);
  const first = drawer ? at("close-side") : document.querySelector("#conversations .title");
  ((open && first) || at("prompt")).focus();
}
export const sideIsOpen = () => document.body.classList.contains("listing");

function renaming(item, conversation, show) {
  const form = make("form"), input = make("input");
  input.value = titleOf(conversation);
  input.ariaLabel = "New name";
  const finish = () => { if (form.isConnected) { rename(conversation.id, input.value.trim()); show(); } };
  form.append(input);
  form.addEventListener("submit", (event) => { event.preventDefault(); finish(); });
  input.addEventListener("blur", finish);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); input.value = conversation.title ?? ""; finish(); }
  });
  item.replaceChildren(form);
  input.select();
}

function entry(conversation, current, {onOpen, onRemove, show}) {
  const item = make("li"), title = titleOf(conversation);
  const open = button("", () => { openSide(false); onOpen(conversation.id); }, {kind: "title"});
  open.append(make("span", title));
  if (conversation.id === current) open.setAttribute("aria-current", "true");
  const erase = button("✕", () => {
    if (erase.textContent === "✕") {  // asked once more, in place
      erase.textContent = "Delete?";
      setTimeout(() => { erase.textContent = "✕"; }, 4000);
      return;
    }
    remove(conversation.id);
    onRemove(conversation.id);
    show();
  }, {label: `Delete ${title}`, kind: "icon"});
  item.append(
    open,
    button("✎", () => renaming(item, conversation, show), {label: `Rename ${title}`, kind: "icon"}),
    button("↓", () => download(fileName(conversation) + ".md", "text/markdown", asMarkdown(conversation)),
      {label: `Export ${title}`, kind: "icon"}),
    erase,
  );
  return item;
}

// `current`: a function that returns the id of the open conversation.
export function sidebar(current, {onOpen, onRemove, onStorage}) {
  const show = () => {
    const all = conversations();
    at("conversations").replaceChildren(...all.map((one) => entry(one, current(), {onOpen, onRemove, show})));
    at("none").hidden = all.length > 0;
    at("export-all").hidden = all.length === 0;
  };
  at("open-side").addEventListener("click", () => openSide(!sideIsOpen()));
  at("close-side").addEventListener("click", () => openSide(false));
  at("shade").addEventListener("click", () => openSide(false));
  at("export-all").addEventListener("click", () => {
    download("mycli-conversations.json", "application/json", JSON.stringify(conversations(), null, 2));
  });
  addEventListener("storage", () => { onStorage(); show(); });  // another tab has written
  return show;
}
