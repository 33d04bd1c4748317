// A chat, a stream, tools, a format, vectors and the lists with Ollama's JavaScript client:
// node ollama_client.mjs URL MODEL EMBEDDING_URL EMBEDDING_MODEL
import {Ollama} from "ollama";

const [url, model, embeddingUrl, embeddingModel] = process.argv.slice(2);
const client = new Ollama({host: url});
const messages = [{role: "user", content: "What is the capital of Japan?"}];
const check = (holds, text) => { if (!holds) throw new Error(text); };
const options = {temperature: 0, num_predict: 12};

const whole = await client.chat({model, messages, options});
check(whole.done && whole.message.role === "assistant" && whole.eval_count > 0, "chat");
let text = "", last;
for await (const part of await client.chat({model, messages, options, stream: true})) {
  text += part.message.content;
  last = part;
}
check(last.done && text === whole.message.content, "stream");
text = "";
for await (const part of await client.generate({model, prompt: messages[0].content, options, stream: true})) {
  text += part.response;
}
check(text === whole.message.content, "generate");
const format = {type: "object", properties: {size: {type: "integer"}}, required: ["size"]};
const made = await client.chat({model, messages, format, options: {temperature: 0, num_predict: 64}});
check(Number.isInteger(JSON.parse(made.message.content).size), "format");
const tool = {type: "function", function: {name: "look", description: "Looks.", parameters: {type: "object"}}};
check((await client.chat({model, messages, tools: [tool], options})).done, "tools");
check((await client.list()).models.some((entry) => entry.name === model), "list");
check((await client.show({model})).details.family.length > 0, "show");
check((await client.ps()).models.length === 1, "ps");
check((await client.version()).version.length > 0, "version");
const embedder = new Ollama({host: embeddingUrl});
const {embeddings} = await embedder.embed({model: embeddingModel, input: ["a", "b"]});
check(embeddings.length === 2 && embeddings[0].length > 1, "embed");
const {embedding} = await embedder.embeddings({model: embeddingModel, prompt: "a"});
check(JSON.stringify(embedding) === JSON.stringify(embeddings[0]), "embeddings");
let refused = "";
try { await client.pull({model: "other"}); } catch (error) { refused = error.message; }
check(refused.includes("does not change the models"), "pull");
console.log("complete");
