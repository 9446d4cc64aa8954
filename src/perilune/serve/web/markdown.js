// How a model's text becomes elements: a small part of Markdown.
//
// It is a stranger's text. Elements are made one by one from a fixed list of tags and attributes, text enters through
// textContent, and no HTML is ever parsed: whatever the text spells, it is shown and never run. Supported: paragraphs,
// headings, lists, quotes, tables, rules, fenced and inline code, emphasis, links to http and https.

// Elements -------------------------------------------------------------------------------------------------------------

export function el(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) element.append(child); // an argument list has a longest length, an array has none
  return element;
}

export function copyButton(text) {
  const button = el("button", { type: "button", text: "Copy" });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  button.hidden = !navigator.clipboard; // a page that came over plain HTTP from another machine has none
  return button;
}

// Markdown -------------------------------------------------------------------------------------------------------------

const DEEPEST = 5; // of lists and quotes in each other, and of emphasis; what is deeper is shown as it was written
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]{0,30})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,12})([-*+]|(\d{1,9})[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)+(?:[ \t]*:?-+:?[ \t]*)?$/;

// The blocks of a text, as plain values: equal values are shown by equal elements.
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let paragraph = [];
  const close = () => {
    if (paragraph.length) blocks.push({ kind: "paragraph", text: paragraph.join("\n") });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    let found;
    if (!line.trim()) {
      close();
    } else if ((found = FENCE.exec(line))) {
      close();
      const closes = (text) => /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(text)?.[1].startsWith(found[1]);
      const body = [];
      while (++at < lines.length && !closes(lines[at])) body.push(lines[at]);
      blocks.push({ kind: "code", language: found[2], text: body.join("\n") });
    } else if ((found = HEADING.exec(line))) {
      close();
      blocks.push({ kind: "heading", level: Math.min(4, found[1].length + 1), text: found[2].replace(/[ \t]+#+$/, "") });
    } else if (RULE.test(line)) {
      close();
      blocks.push({ kind: "rule" });
    } else if (QUOTE.test(line)) {
      close();
      const body = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) body.push(lines[at].replace(QUOTE, ""));
      at--;
      blocks.push({ kind: "quote", text: body.join("\n") });
    } else if ((found = ITEM.exec(line)) && !(paragraph.length && found[3] && found[3] !== "1")) {
      close();
      at = takeList(lines, at, blocks) - 1;
    } else if (!paragraph.length && line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
      const rows = [cellsOf(line)];
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cellsOf(lines[at]));
      at--;
      blocks.push({ kind: "table", rows });
    } else {
      paragraph.push(line);
    }
  }
  close();
  return blocks;
}

// A list from its first line on; returns the line after it. What is indented below an item belongs to it.
function takeList(lines, at, blocks) {
  const first = ITEM.exec(lines[at]);
  const numbered = first[3] !== undefined;
  const list = { kind: "list", start: numbered ? Number(first[3]) : null, items: [] };
  let width = 0;
  for (; at < lines.length; at++) {
    const line = lines[at];
    const item = ITEM.exec(line);
    const indent = line.search(/\S/);
    if (item && item[1].length <= first[1].length + 1) {
      if ((item[3] !== undefined) !== numbered) break;
      width = item[0].length;
      list.items.push([line.slice(width)]);
    } else if (indent < 0 ? continues(lines, at, first[1].length, numbered) : indent > first[1].length) {
      list.items.at(-1).push(line.slice(Math.min(width, Math.max(indent, 0))));
    } else {
      break;
    }
  }
  list.items = list.items.map((body) => body.join("\n"));
  blocks.push(list);
  return at;
}

// Whether the list goes on after an empty line.
function continues(lines, at, indent, numbered) {
  const next = lines[at + 1] ?? "";
  const item = ITEM.exec(next);
  if (item && item[1].length <= indent + 1) return (item[3] !== undefined) === numbered;
  return next.search(/\S/) > indent + 1;
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 40).map((cell) => cell.trim());

function elementOf(block, depth) {
  switch (block.kind) {
    case "code": {
      const label = block.language ? { "aria-label": `Code, ${block.language}` } : {};
      const body = el("pre", { tabindex: "0", ...label }, el("code", { text: block.text }));
      return el("div", { class: "block" }, body, copyButton(() => block.text));
    }
    case "heading":
      return el(`h${block.level}`, {}, inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, elementsOf(block.text, depth + 1));
    case "list": {
      const items = block.items.map((item) => el("li", {}, itemOf(item, depth + 1)));
      return block.start === null ? el("ul", {}, items) : el("ol", { start: block.start }, items);
    }
    case "table": {
      const [head, ...rows] = block.rows;
      const cells = (tag, row) => el("tr", {}, head.map((_, column) => el(tag, {}, inline(row[column] ?? ""))));
      const body = el("tbody", {}, rows.map((row) => cells("td", row)));
      return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, cells("th", head)), body));
    }
    default:
      return el("p", {}, inline(block.text));
  }
}

function elementsOf(text, depth) {
  if (depth > DEEPEST) return [el("p", { text })];
  return blocksOf(text).map((block) => elementOf(block, depth));
}

// The one paragraph of a short item needs no element of its own.
function itemOf(text, depth) {
  const made = elementsOf(text, depth);
  return made[0]?.tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

// Emphasis, code and links inside a line. Every search that fails is not tried again, so that time grows with length.
function inline(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const nodes = [];
  const hopeless = new Set();
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  const closing = (mark, from) => {
    if (hopeless.has(mark)) return -1;
    for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at + mark.length)) {
      if (mark.length === 2 && text[at + 2] === mark[0]) at += 1; // ***a***: the inner mark closes first
      const inWord = mark[0] === "_" && isWord(text[at + mark.length]);
      const longer = mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark);
      if (/\S/.test(text[at - 1]) && !inWord && !longer) return at;
    }
    hopeless.add(mark);
    return -1;
  };
  for (let at = 0; at < text.length; ) {
    const character = text[at];
    if (character === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (character === "`") {
      const ticks = /^`+/.exec(text.slice(at, at + 100))[0];
      const end = hopeless.has(ticks) ? -1 : endOfCode(text, ticks, at + ticks.length);
      if (end >= 0) {
        flush();
        nodes.push(el("code", { text: text.slice(at + ticks.length, end).replace(/^ (.*) $/s, "$1") }));
        at = end + ticks.length;
      } else {
        hopeless.add(ticks);
        plain += ticks;
        at += ticks.length;
      }
      continue;
    }
    const link = character === "[" ? linkAt(text, at) : null;
    if (link) {
      flush();
      nodes.push(link.element(depth));
      at = link.end;
      continue;
    }
    const mark = MARKS.find(([each]) => text.startsWith(each, at));
    if (mark) {
      const [sign, tag] = mark;
      const opens = /\S/.test(text[at + sign.length] ?? " ") && !(sign[0] === "_" && isWord(text[at - 1]));
      const end = opens ? closing(sign, at + sign.length + 1) : -1;
      if (end >= 0) {
        flush();
        nodes.push(el(tag, {}, inline(text.slice(at + sign.length, end), depth + 1)));
        at = end + sign.length;
      } else {
        plain += sign;
        at += sign.length;
      }
      continue;
    }
    plain += character;
    at += 1;
  }
  flush();
  return nodes;
}

function endOfCode(text, ticks, from) {
  for (let at = text.indexOf(ticks, from); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end++;
    if (end - at === ticks.length) return at;
    at = text.indexOf(ticks, end);
  }
  return -1;
}

// [label](address): only http and https, and the host is shown, so that a label cannot pretend another one.
function linkAt(text, at) {
  const found = /^\[([^\]\n]{1,300})\]\((\S{1,2000}?)\)/.exec(text.slice(at, at + 2400));
  if (!found || !/^https?:\/\//i.test(found[2])) return null;
  let address;
  try {
    address = new URL(found[2]);
  } catch {
    return null;
  }
  if (!["http:", "https:"].includes(address.protocol)) return null;
  const options = { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow" };
  const element = (depth) => {
    const label = inline(found[1].replaceAll("[", ""), Math.max(depth, DEEPEST));
    return el("a", options, label, el("small", { text: ` (${address.host})` }));
  };
  return { element, end: at + found[0].length };
}

// Show a text that grows: blocks that did not change keep their elements.
export function showMarkdown(container, text) {
  const blocks = blocksOf(text).map((block) => [JSON.stringify(block), block]);
  const shown = container.shownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same][0]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const [, block] of blocks.slice(same)) container.append(elementOf(block, 0));
  container.shownBlocks = blocks.map(([value]) => value);
}
