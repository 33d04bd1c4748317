// Settings, the model that is chosen, and what the server says about itself.

import {health, models} from "./client.js";
import {at, make} from "./dom.js";
import {apiKey, keepApiKey, keepSettings, settings} from "./storage.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const REMEMBERED = ["system", ...NUMBERS, "reasoning", "budget", "theme"];

// The fields of a request besides its messages.
export function requestOptions() {
  const body = {model: at("model").value};
  for (const name of NUMBERS) if (at(name).value !== "") body[name] = Number(at(name).value);
  const reasoning = {};
  if (at("reasoning").value) reasoning.enabled = at("reasoning").value === "on";
  if (at("budget").value) reasoning.max_tokens = Number(at("budget").value);
  if (Object.keys(reasoning).length) body.reasoning = reasoning;
  return body;
}

export const systemPrompt = () => at("system").value.trim();

function remember() {
  const values = Object.fromEntries(REMEMBERED.map((name) => [name, at(name).value]));
  keepSettings({...values, model: at("model").value});
  document.documentElement.dataset.theme = at("theme").value;
}

const STATES = {loaded: "", loading: " · loading", failed: " · failed"};
function describe(model) {
  if (model.state === undefined) return model.id;
  return model.id + (STATES[model.state] ?? ` · ${model.state}`);
}

function showModel() {
  const chosen = at("model").selectedOptions[0];
  at("model").title = chosen?.title ?? "";
  document.title = (chosen ? chosen.value + " · " : "") + "mycli";
}

async function listModels() {
  try {
    const listed = await models(), before = at("model").value || settings().model;
    const options = listed.map((model) => {
      const option = make("option", describe(model));
      option.value = model.id;
      option.title = `${model.id}, context ${model.context_length} tokens`;
      return option;
    });
    const texts = (nodes) => nodes.map((node) => node.textContent).join("\n");
    // An open menu is replaced only if a state has changed, because that may close it.
    if (texts(options) !== texts([...at("model").options])) at("model").replaceChildren(...options);
    if (listed.some((model) => model.id === before)) at("model").value = before;
    at("keyed").hidden = !apiKey();
    showModel();
  } catch (error) {
    if (error.status === 401) askForKey();
  }
}

let listed;  // settled when the list that was requested last has arrived

export const loadModels = () => (listed = listModels());

// A request names its model: what is sent before there is one waits for the list.
export async function modelChosen() {
  if (!at("model").value) await listed;
}

export function askForKey() {
  at("keyed").hidden = false;
  at("settings").open = true;
  at("key").focus();
}

export async function showState() {
  if (document.hidden) return;
  try {
    const {status, running, waiting, cache} = await health();
    const words = {ok: [], draining: ["shutting down"], failed: ["failed"]}[status] ?? [];
    const cached = cache === undefined ? [] : [`cache ${Math.round(cache * 100)} %`];
    const counts = [[running, "running"], [waiting, "waiting"]].filter(([count]) => count).map((pair) => pair.join(" "));
    at("state").textContent = [...words, ...counts, ...cached].join(" · ");
  } catch { at("state").textContent = "not reachable"; }
}

export function listenForOptions() {
  const values = settings();
  for (const name of REMEMBERED) {
    if (typeof values[name] === "string") at(name).value = values[name];
    at(name).addEventListener("change", remember);
  }
  document.documentElement.dataset.theme = at("theme").value;
  at("key").value = apiKey();
  at("keyed").hidden = !apiKey();
  at("key").addEventListener("change", () => { keepApiKey(at("key").value); loadModels(); });
  at("model").addEventListener("change", () => { remember(); showModel(); });
  at("model").addEventListener("focus", loadModels);  // states change
  document.addEventListener("visibilitychange", showState);
  setInterval(showState, 2000);
}
