// One turn, a tool loop and a structured answer with each JavaScript client: node javascript_clients.mjs NAME URL MODEL
import assert from "node:assert";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [name, url, model] = process.argv.slice(2);
const require = createRequire(process.cwd() + "/");
const load = (what) => import(pathToFileURL(require.resolve(what)).href);
const question = "Which files are there?";
let called = 0;

async function ai(make) {
  const {generateText, streamText, generateObject, tool, stepCountIs} = await load("ai");
  const {z} = await load("zod");
  const chat = await make();
  const tools = {list_files: tool({
    description: "List the files of a folder.", inputSchema: z.object({path: z.string()}),
    execute: async () => { called++; return "a.txt, b.txt"; },
  })};
  const common = {model: chat, maxOutputTokens: 200, maxRetries: 0};
  const found = await generateText({...common, prompt: question, tools, stopWhen: stepCountIs(3)});
  assert(found.text && called === 1, "no tool loop");
  const stream = streamText({...common, prompt: question, tools, stopWhen: stepCountIs(3)});
  assert((await stream.text) && called === 2, "no streamed tool loop");
  const typed = await generateObject({...common, prompt: question, schema: z.object({name: z.string(), size: z.number()})});
  assert(typeof typed.object.name === "string");
}

const clients = {
  "@ai-sdk/openai": () => ai(async () => (await load("@ai-sdk/openai")).createOpenAI({baseURL: `${url}/v1`, apiKey: "any"})(model)),
  "@ai-sdk/openai chat": () => ai(async () => (await load("@ai-sdk/openai")).createOpenAI({baseURL: `${url}/v1`, apiKey: "any"}).chat(model)),
  "@ai-sdk/openai-compatible": () => ai(async () => (await load("@ai-sdk/openai-compatible")).createOpenAICompatible(
    {name: "mycli", baseURL: `${url}/v1`, apiKey: "any", supportsStructuredOutputs: true})(model)),
  "@ai-sdk/anthropic": () => ai(async () => (await load("@ai-sdk/anthropic")).createAnthropic({baseURL: `${url}/v1`, apiKey: "any"})(model)),
  "openai": async () => {
    const {default: OpenAI} = await load("openai");
    const client = new OpenAI({baseURL: `${url}/v1`, apiKey: "any"});
    const messages = [{role: "user", content: question}];
    assert((await client.chat.completions.create({model, messages, max_tokens: 20})).choices[0].message.content);
    const runner = client.chat.completions.runTools({model, messages, stream: true, max_tokens: 200, tools: [{type: "function", function: {
      name: "list_files", function: () => { called++; return "a.txt"; }, parse: JSON.parse,
      parameters: {type: "object", properties: {path: {type: "string"}}, required: ["path"]},
    }}]});
    assert((await runner.finalContent()) && called === 1);
    assert((await client.responses.create({model, input: question, max_output_tokens: 20})).output_text);
  },
  "@anthropic-ai/sdk": async () => {
    const {default: Anthropic} = await load("@anthropic-ai/sdk");
    const client = new Anthropic({baseURL: url, apiKey: "any"});
    const messages = [{role: "user", content: question}];
    assert((await client.messages.create({model, messages, max_tokens: 20})).content[0].text);
    const tools = [{name: "list_files", input_schema: {type: "object", properties: {path: {type: "string"}}, required: ["path"]}}];
    const message = await client.messages.stream({model, messages, tools, max_tokens: 200}).finalMessage();
    assert(message.content.some((block) => block.type === "tool_use"));
  },
};

await clients[name]();
console.log("completed");
