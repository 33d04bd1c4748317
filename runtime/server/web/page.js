// The chat page: what is open, and what happens when something is sent, edited, regenerated or stopped.

import {attached, listenForFiles, setAttached, withFiles} from "./attachments.js";
import {streamReply} from "./client.js";
import {at, showProblem} from "./dom.js";
import {askForKey, listenForOptions, loadModels, modelChosen, requestOptions, showState, systemPrompt} from "./options.js";
import {openSide, sidebar, sideIsOpen} from "./sidebar.js";
import {conversations, createConversation, keep, openId, setOpenId} from "./storage.js";
import {addUserTurn, removeTurns, ReplyView, scrollDown} from "./turns.js";

let conversation = createConversation();
let leaving = false;
let running = null;  // {control, conversation, message} of the reply that streams
const showSide = sidebar(() => conversation.id, {onOpen: open, onRemove: removed, onStorage: refresh});

function showMessage(message, index) {
  if (message.role === "user") addUserTurn(message, (content) => again(index, {...message, content}));
  else new ReplyView(message.model, () => again(index)).paint(message);
}

function show() {
  removeTurns();
  conversation.messages.forEach(showMessage);
  scrollDown();
}

function open(id) {
  if (id === conversation.id) return;  // what is stored lacks the reply that streams
  const stored = conversations().find((other) => other.id === id);
  if (!stored) return;
  running?.control.abort();
  conversation = stored;
  setOpenId(id);
  showProblem("");
  show();
  showSide();
}

// Shows what another tab added to the open conversation: this tab's next reply would overwrite it.
function refresh() {
  const stored = conversations().find((other) => other.id === conversation.id);
  if (!stored || running || document.querySelector(".editing")) return;
  if (JSON.stringify(stored.messages) === JSON.stringify(conversation.messages)) return;
  conversation = stored;
  show();
}

function fresh() {
  running?.control.abort();
  conversation = createConversation();
  setOpenId(null);
  showProblem("");
  removeTurns();
  showSide();
  if (sideIsOpen()) openSide(false);
  at("prompt").focus();
}

function removed(id) {
  if (id !== conversation.id) return;
  conversation.removed = true;  // its reply, if one streams, does not bring it back
  fresh();
}

function note({first, began, counted, usage, ending}) {
  const count = usage?.completion_tokens ?? counted, seconds = (performance.now() - first) / 1000;
  if (!first) return ending;
  return [
    `${count} tokens`,
    ...(count > 1 && seconds > 0 ? [`${((count - 1) / seconds).toFixed(1)} tokens/s`] : []),
    `first after ${Math.round(first - began)} ms`,
    ...(usage ? [`prompt ${usage.prompt_tokens} (${usage.prompt_tokens_details?.cached_tokens ?? 0} cached)`] : []),
    ...(ending ? [ending] : []),
  ].join(" · ");
}

// Fills `message` from the stream; `view` shows it meanwhile.
async function receive(message, view, body, control) {
  const times = {began: performance.now(), first: 0, counted: 0, usage: null, ending: ""};
  try {
    for await (const {text, reasoning, reason, usage} of streamReply(body, control.signal)) {
      times.usage = usage ?? times.usage;
      if (text || reasoning) {
        if (!times.first) showState();
        times.first ||= performance.now();
        if (!times.usage) times.counted++;
      }
      if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
      if (message.reasoning && !message.content) message.seconds = (performance.now() - times.first) / 1000;
      message.content += text ?? "";
      if (reason === "length") times.ending = "cut off";
      message.note = note(times);
      view.update(message);
    }
  } catch (error) {
    times.ending = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") {
      showProblem(error.message);
      if (error.status === 401) askForKey();
    }
  }
  message.note = note(times);
  return times.ending !== "failed" || Boolean(message.content);
}

async function reply(restore) {
  const mine = conversation, body = requestOptions(), control = new AbortController();
  const sent = mine.messages.map((message) => ({role: message.role, content: withFiles(message)}));
  if (systemPrompt()) sent.unshift({role: "system", content: systemPrompt()});
  const message = {role: "assistant", content: "", model: body.model, note: ""}, index = mine.messages.length;
  const view = new ReplyView(body.model, () => again(index));
  running = {control, conversation: mine, message};
  setOpenId(mine.id);
  view.busy(true);
  busy(true);
  scrollDown();
  const arrived = await receive(message, view, {...body, messages: sent}, control);
  if (leaving) return;  // the request failed because the page goes, which has kept the reply
  view.busy(false);
  if (arrived && (message.content || message.reasoning)) {
    mine.messages.push(message);
    view.paint(message);
    if (!mine.removed && !keep(mine)) showProblem("The browser has no room: the oldest conversations were dropped.");
  } else restore(mine);
  if (running?.control === control) {
    running = null;
    busy(false);
  }
  if (mine === conversation) setOpenId(mine.messages.length ? mine.id : null);
  showSide();
  showState();
}

function busy(yes) {
  at("send").hidden = yes;
  at("stop").hidden = !yes;
  at("talk").ariaBusy = String(yes);
  document.body.classList.toggle("generating", yes);
  if (!yes && matchMedia("(hover: hover)").matches) at("prompt").focus();
}

function grow() {
  at("prompt").rows = Math.min(12, at("prompt").value.split("\n").length);
}

async function ask(event) {
  event?.preventDefault();
  await modelChosen();
  const content = at("prompt").value, files = attached();
  if (running || !(content.trim() || files.length)) return;
  const message = {role: "user", content, ...(files.length ? {files} : {})};
  at("prompt").value = "";
  setAttached([]);
  showProblem("");
  grow();
  conversation.messages.push(message);
  showMessage(message, conversation.messages.length - 1);
  reply((mine) => {  // a question without an answer is given back
    mine.messages.pop();
    if (mine !== conversation) return;
    show();
    if (!at("prompt").value) { at("prompt").value = content; grow(); }
    if (!attached().length) setAttached(files);
  });
}

// Asks again from a message on: an edited question, or the question before a reply. Without an answer nothing changes.
async function again(index, edited) {
  const shown = conversation;
  await modelChosen();
  if (running || conversation !== shown) return;
  const before = conversation.messages;
  conversation.messages = [...before.slice(0, index), ...(edited ? [edited] : [])];
  showProblem("");
  removeTurns(index);
  if (edited) showMessage(edited, index);
  reply((mine) => {
    mine.messages = before;
    if (mine === conversation) show();
  });
}

const lastOf = (selector) => [...document.querySelectorAll(selector)].at(-1);

function onKey(event) {
  if (event.key === "Escape") {
    if (sideIsOpen()) openSide(false);
    else running?.control.abort();
  }
  const act = event.altKey && {KeyN: fresh, KeyL: () => openSide(!sideIsOpen()), KeyR: () => lastOf(".turn .again")?.click()}[event.code];
  if (!act) return;
  event.preventDefault();
  act();
}

// A page that is closed keeps what has arrived, and a question that has no answer yet.
function keepPartial() {
  const {conversation: mine, message} = running ?? {};
  leaving = true;
  if (!mine || mine.removed) return;
  const arrived = message.content || message.reasoning;
  const stored = conversations().find((other) => other.id === mine.id)?.messages.length ?? 0;
  if (arrived) keep({...mine, messages: [...mine.messages, message]});
  else if (mine.messages.length > stored) keep(mine);  // shorter before another reply to the same question
}

at("write").addEventListener("submit", ask);
addEventListener("pagehide", keepPartial);
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });  // its request has ended
at("stop").addEventListener("click", () => running?.control.abort());
at("fresh").addEventListener("click", fresh);
at("problem").lastElementChild.addEventListener("click", () => showProblem(""));
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  if (event.key === "ArrowUp" && !at("prompt").value && !running) { event.preventDefault(); lastOf(".turn .edit")?.click(); }
});
document.addEventListener("keydown", onKey);
listenForFiles();
listenForOptions();
showSide();
open(openId());
loadModels();
showState();
