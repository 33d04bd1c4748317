// Markdown to nodes: parsed by marked, sanitized by DOMPurify, code coloured by highlight.js, mathematics set by KaTeX.
//
// What a model writes is hostile. HTML in it is shown as text; the sanitizer then admits only what Markdown can produce.
// KaTeX builds nodes without parsing HTML, with everything that loads or links off.

import {button, copy, make} from "./dom.js";

const TAGS = [
  "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
  "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "span", "div",
];
const SANITIZE = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "start", "align"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i, ADD_URI_SAFE_ATTR: ["start", "align"], RETURN_DOM_FRAGMENT: true,
};
const HIGHLIGHTED = {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true};
const MAX_HIGHLIGHTED = 50_000, MAX_FORMULA = 4000;

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[sign]);

// A formula: \( \), \[ \], $$ $$, or $ $ without spaces inside its ends and without a digit after it, as in "$5 and $6".
const FORMULAS = [
  [/^\\\[([^]{1,4000}?)\\\]/, true],
  [/^\$\$([^]{1,4000}?)\$\$/, true],
  [/^\\\(([^]{1,4000}?)\\\)/, false],
  [/^\$(?![\s$])((?:\\[^\n]|[^\\$\n]){1,1000}?)(?<!\s)\$(?!\d)/, false],
];

function formula(source, display) {
  for (const [pattern, displayed] of FORMULAS) {
    const match = (!display || displayed) && pattern.exec(source);
    if (match) return {raw: match[0], text: match[1].trim(), displayed};
  }
  return undefined;
}

const rendered = ({text, displayed}) => `<span class="formula${displayed ? " displayed" : ""}">${escaped(text)}</span>`;
const EXTENSIONS = [
  {
    name: "displayedFormula", level: "block",
    start: (source) => /\n {0,3}(?:\$\$|\\\[)/.exec(source)?.index,
    tokenizer(source) {
      const indent = /^ {0,3}/.exec(source)[0].length, match = formula(source.slice(indent), true);
      if (!match || !/^[ \t]*(?:\n|$)/.test(source.slice(indent + match.raw.length))) return undefined;
      return {...match, type: "displayedFormula", raw: source.slice(0, indent) + match.raw};
    },
    renderer: (token) => `<p>${rendered(token)}</p>`,
  },
  {
    name: "formula", level: "inline",
    start: (source) => /\$|\\[([]/.exec(source)?.index,
    tokenizer(source) {
      const match = formula(source, false);
      return match && {...match, type: "formula"};
    },
    renderer: rendered,
  },
];
const RENDERER = {
  html: ({text}) => escaped(text),
  // An image would ask another host; its text and address are shown instead.
  image: ({text, href}) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  checkbox: ({checked}) => (checked ? "☑ " : "☐ "),
  code({text, lang}) {
    return `<pre><code class="language-${escaped((lang ?? "").split(/\s/)[0].slice(0, 40))}">${escaped(text)}\n</code></pre>`;
  },
};

let parser = null;
function parsing() {
  parser ??= new marked.Marked({gfm: true, extensions: EXTENSIONS, renderer: RENDERER});
  return parser;
}

function decorateCode(pre) {
  const code = pre.firstElementChild, text = code.textContent.replace(/\n$/, "");
  const language = code.className.replace(/^language-/, "");
  code.textContent = text;
  if (text.length <= MAX_HIGHLIGHTED && hljs.getLanguage(language)) {
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, {language, ignoreIllegals: true}).value, HIGHLIGHTED));
  }
  const block = make("div", "", "code"), bar = make("div");
  const copying = button("Copy", () => copy(copying, text), {label: "Copy this code"});
  bar.append(make("span", language), copying);
  pre.replaceWith(block);
  block.append(bar, pre);
  pre.tabIndex = 0;  // long lines scroll by keys
}

function decorate(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const pre of fragment.querySelectorAll("pre")) decorateCode(pre);
  for (const span of fragment.querySelectorAll(".formula")) {
    const text = span.textContent.slice(0, MAX_FORMULA), displayMode = span.classList.contains("displayed");
    try {
      katex.render(text, span, {displayMode, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 300});
    } catch { span.textContent = text; }  // not a formula, or not finished yet
  }
  for (const table of fragment.querySelectorAll("table")) table.tabIndex = 0;
  return fragment;
}

const nodesOf = (tokens) => decorate(DOMPurify.sanitize(parsing().parser(tokens), SANITIZE));

// Shows a text that grows: only blocks that have changed are made anew, so a selection in the others stays.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.blocks = [];  // {raw, nodes} as shown
  }

  update(text) {
    try {
      this.updateBlocks(parsing().lexer(text));
    } catch {  // nested too deeply for the parser
      this.blocks = [];
      this.node.replaceChildren(make("pre", text));
    }
  }

  updateBlocks(tokens) {
    let same = 0;
    while (same < this.blocks.length && this.blocks[same].raw === tokens[same]?.raw) same++;
    for (const {nodes} of this.blocks.splice(same)) for (const node of nodes) node.remove();
    if (!this.blocks.length) this.node.replaceChildren();
    for (const token of tokens.slice(same)) {
      const fragment = nodesOf([token]), nodes = [...fragment.childNodes];
      this.node.append(fragment);
      this.blocks.push({raw: token.raw, nodes});
    }
  }
}
