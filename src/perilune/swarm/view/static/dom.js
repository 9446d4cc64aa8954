// Elements and numbers for people. Text enters the page through textContent alone, never as HTML.

export function el(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

export const byId = (id) => document.getElementById(id);

export function duration(ms) {
  if (ms === null || ms === undefined) return "";
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 1) return `${Math.round(ms)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

export function count(number) {
  if (number < 10000) return String(number);
  if (number < 1e6) return `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)}k`;
  if (number < 1e9) return `${(number / 1e6).toFixed(number < 1e7 ? 2 : 1)}M`;
  return `${(number / 1e9).toFixed(2)}G`;
}

export function money(amount) {
  if (!amount) return "0";
  return amount < 0.01 ? amount.toFixed(5) : amount < 100 ? amount.toFixed(3) : amount.toFixed(0);
}

export function bytes(size) {
  return size < 1024 ? `${size} bytes` : size < 1 << 20 ? `${(size / 1024).toFixed(1)} KB` : `${(size / (1 << 20)).toFixed(1)} MB`;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A colour of the style sheet as a canvas understands it, light or dark as the page is now.
export function colour(name) {
  const probe = el("i", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
