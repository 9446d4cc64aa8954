// Text that a person decides by: every character counts and is seen. What has no shape, or turns the direction of what
// follows, is written as its number; each string of a JSON text keeps its own direction.

import { el } from "./dom.js";

const UNSEEN = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u2000-\u200a\u202f\u205f\u2800\u3000\u3164\ufe00-\ufe0f\uffa0]/u;
const UNSEEN_RUNS = new RegExp(`(${UNSEEN.source}+)`, "u");
const JSON_STRINGS = /("[^"\\]*(?:\\.[^"\\]*)*")/;
const ALIKE = /[\p{Script=Cyrillic}\p{Script=Greek}\p{Script=Armenian}\p{Script=Cherokee}\p{Script=Lisu}\p{Script=Coptic}]/u;
const MOST_NAMED = 8;

const number = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

// Nodes for `append`.
export function exact(text) {
  return text.split(JSON_STRINGS).filter(Boolean).map((part) => el("bdi", {}, ...seen(part)));
}

function seen(text) {
  return text.split(UNSEEN_RUNS).filter(Boolean).map((part) =>
    UNSEEN.test(part) ? el("mark", { text: [...part].map((each) => `<${number(each)}>`).join("") }) : document.createTextNode(part),
  );
}

// A sentence about letters that look like others, where a word mixes them with Latin ones; else "".
export function warning(text) {
  const found = new Set();
  for (const word of text.replace(/\\(u[0-9a-f]{4}|.)/gi, " ").match(/[^\s"'`,;(){}[\]<>|]+/gu) ?? []) {
    const hasLatin = /[A-Za-z]/.test(word);
    for (const letter of word) {
      if ((ALIKE.test(letter) && hasLatin) || (!/[ -~]/.test(letter) && /^[ -~]+$/.test(letter.normalize("NFKC")) && !UNSEEN.test(letter))) found.add(letter);
    }
  }
  if (!found.size) return "";
  const named = [...found].slice(0, MOST_NAMED).map((letter) => `${letter} ${number(letter)}`).join(", ");
  return `Some letters only look like Latin ones: ${named}${found.size > MOST_NAMED ? ", …" : ""}`;
}
