// The turns of a conversation as nodes, with their actions.

import {labelOf} from "./attachments.js";
import {at, button, copy, make} from "./dom.js";
import {MarkdownView} from "./markdown.js";

const near = () => at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 80;
export const scrollDown = () => { at("talk").scrollTop = at("talk").scrollHeight; };

export function showEmpty(empty) { at("empty").hidden = !empty; }

function addTurn(role, label) {
  showEmpty(false);
  const node = make("article", "", "turn " + role);
  node.append(make("span", label, "who"));
  at("talk").append(node);
  return node;
}

export function removeTurns(from = 0) {
  for (const node of [...document.querySelectorAll(".turn")].slice(from)) node.remove();
  showEmpty(from === 0);
}

function actions(...buttons) {
  const bar = make("div", "", "actions");
  bar.append(...buttons);
  return bar;
}

export function addUserTurn(message, onEdit) {
  const node = addTurn("user", "You: "), bubble = make("div", "", "bubble");
  for (const file of message.files ?? []) {
    const folded = make("details");
    folded.append(make("summary", labelOf(file)), make("pre", file.text));
    bubble.append(folded);
  }
  bubble.append(make("div", message.content, "text"));
  const copying = button("Copy", () => copy(copying, message.content), {label: "Copy this message"});
  node.append(bubble, actions(copying, button("Edit", () => edit(node, message, onEdit), {label: "Edit and send again", kind: "edit"})));
  return node;
}

function edit(node, message, onEdit) {
  if (node.querySelector("form")) return;
  const form = make("form", "", "editing"), area = make("textarea"), send = make("button", "Send", "main");
  const close = () => { form.remove(); node.classList.remove("edited"); at("prompt").focus(); };
  area.value = message.content;
  area.ariaLabel = "Edited message";
  const bar = make("div");
  bar.append(button("Cancel", close), send);
  form.append(area, bar);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim() || message.files?.length) onEdit(area.value);
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape") { event.stopPropagation(); close(); }
  });
  node.classList.add("edited");
  node.append(form);
  area.focus();
}

// A reply that may still grow. `update` paints at the next frame, or later where painting is slow.
export class ReplyView {
  constructor(model, onRegenerate) {
    this.node = addTurn("assistant", `${model || "Reply"}: `);
    this.thought = make("details", "", "thought");
    this.thought.hidden = true;
    this.thought.append(make("summary"), make("div"));
    this.body = make("div", "", "body");
    this.note = make("div", "", "note");
    this.content = "";
    const copying = button("Copy", () => copy(copying, this.content), {label: "Copy this reply"});
    const again = button("Regenerate", onRegenerate, {label: "Regenerate this reply", kind: "again"});
    this.node.append(this.thought, this.body, this.note, actions(copying, again));
    this.markdown = new MarkdownView(this.body);
    this.planned = this.pause = 0;
  }

  busy(yes) {
    this.node.classList.toggle("busy", yes);
  }

  update(reply) {
    this.latest = reply;
    if (this.planned) return;
    const paint = () => this.paint(this.latest);
    this.planned = this.pause > 4 ? setTimeout(paint, 4 * this.pause) : requestAnimationFrame(paint);
  }

  paint({content, reasoning, seconds, note}) {
    this.planned = 0;
    const follow = near(), began = performance.now();
    this.content = content;
    if (reasoning) {
      const time = typeof seconds !== "number" ? "" : seconds < 10 ? seconds.toFixed(1) : Math.round(seconds);
      const words = this.node.classList.contains("busy") && !content ? "Thinking…" : "Thought";
      this.thought.hidden = false;
      this.thought.firstElementChild.textContent = time === "" ? "Reasoning" : `${words} ${time} s`;
      if (this.thought.lastElementChild.textContent !== reasoning) this.thought.lastElementChild.textContent = reasoning;
    }
    this.markdown.update(content);
    this.note.textContent = note ?? "";
    this.pause = performance.now() - began;
    if (follow) scrollDown();
  }
}
