"use strict";
// The review page. Text from data is only ever set as textContent, so that it cannot become markup.

const about = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const GRID = 24;
const LAST = 20;
const TILE_SUGGESTIONS = 2; // in the grid
const DIGITS = "1234567890"; // keys of classes
const BUTTONS = 20; // classes with a button in an audit; with more, the name is typed

function make(tag, values = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(100 * share)} %`);

function remembered(storage, name, value) {
  try {
    if (value === undefined) return storage().getItem(name);
    storage().setItem(name, value);
  } catch {
    return null; // a browser that keeps nothing
  }
  return value;
}
const ofTab = (name, value) => remembered(() => window.sessionStorage, name, value);
const ofBrowser = (name, value) => remembered(() => window.localStorage, name, value);

// -- where answers go: a server, or this browser -----------------------------------------------------------------------

const server = {
  session: ofTab("session") || crypto.getRandomValues(new Uint32Array(2)).join("-"),
  async ask(path, values) {
    const shared = { session: this.session, reviewer: reviewer() };
    let response;
    try {
      response = values
        ? await fetch(path, {
            method: "POST",
            headers: { "content-type": "application/json" },
            body: JSON.stringify({ ...shared, ...values }),
          })
        : await fetch(`${path}&${new URLSearchParams(shared)}`);
    } catch {
      throw new Error("The server cannot be reached: is `logitclip review` still running? This answer is not saved.");
    }
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    return found;
  },
  next: (count) => server.ask(`/next?count=${count}`),
  answer: (item, kind, label, count) =>
    server.ask("/answer", { id: item.id, digest: item.digest, kind, label, count }),
  undo: () => server.ask("/undo", { count: 0 }),
  picture: (id) => `/picture/${id}`,
};
ofTab("session", server.session);

const file = {
  name: `logitclip-review-${about.model}`,
  answers: [],
  saved: 0,
  load() {
    const stored = JSON.parse(ofBrowser(this.name) || "null");
    if (stored) [this.answers, this.saved] = [stored.answers, stored.saved];
  },
  keep() {
    if (ofBrowser(this.name, JSON.stringify({ answers: this.answers, saved: this.saved })) === null)
      tellError("This browser does not keep answers: save answers.csv before you close the page.");
  },
  state() {
    const done = new Set(this.answers.map((answer) => answer.id));
    const items = about.data.items;
    const suspects = this.answers.filter((answer) => !answer.audit && answer.kind === "class").slice(-LAST);
    const times = this.answers.slice(-LAST).map((answer) => Date.parse(answer.time));
    const gaps = times.slice(1).map((time, i) => time - times[i]).filter((gap) => gap >= 0 && gap <= 300000);
    return {
      answered: done.size,
      left: items.filter((item) => (item.hidden || item).marked && !done.has(item.id)).length,
      audit: items.filter((item) => item.audit).length,
      audit_left: items.filter((item) => item.audit && !done.has(item.id)).length,
      last: suspects.length,
      last_wrong: suspects.filter((answer) => answer.label !== answer.given).length,
      per_minute: gaps.length ? Math.round((600000 * gaps.length) / Math.max(1000, gaps.reduce((a, b) => a + b))) / 10 : null,
      disagreements: 0,
      can_undo: this.answers.length > 0,
    };
  },
  async next(count) {
    const done = new Set(this.answers.map((answer) => answer.id));
    return { items: about.data.items.filter((item) => !done.has(item.id)).slice(0, count), state: this.state() };
  },
  async answer(item, kind, label, count) {
    const hidden = item.hidden || item;
    const { id, digest, audit } = item;
    const row = hidden.row;
    const time = new Date().toISOString().slice(0, 19) + "Z";
    this.answers.push({ id, row, digest, kind, label, reviewer: reviewer(), time, audit, given: hidden.given });
    this.keep();
    return { ...(await this.next(count)), hidden };
  },
  async undo() {
    const last = this.answers.pop();
    this.saved = Math.min(this.saved, this.answers.length);
    this.keep();
    return { items: last ? about.data.items.filter((item) => item.id === last.id) : [], state: this.state() };
  },
  picture: (id) => about.data.pictures[id] || "data:,",
  csv() {
    const names = ["row", "digest", "kind", "label", "reviewer", "time", "audit"];
    // Spreadsheets take such texts for formulas; a quote comes first, which `logitclip review --answers` removes.
    const plain = (text) => {
      const bare = text.replace(/^'+/, "");
      return /^[=+@\t\r]/.test(bare) || /^-(?!\d)/.test(bare) ? `'${text}` : text;
    };
    const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const lines = this.answers.map((answer) => names.map((name) => quoted(plain(String(answer[name])))).join(","));
    return [names.join(","), ...lines].join("\n") + "\n";
  },
};

const store = about.data ? file : server;

// -- the page ----------------------------------------------------------------------------------------------------------

let items = [];
let current = 0; // the tile with the focus
let grid = false;
let busy = false;

function reviewer() {
  return $("reviewer").value.trim() || "reviewer";
}

function tellError(sentence) {
  $("error").textContent = sentence;
  $("error").hidden = !sentence;
}

function showState(state) {
  const parts = [`${state.answered} answered`];
  if (state.audit) parts.push(`${state.audit_left} of ${state.audit} audit rows left`);
  parts.push(state.left ? `${state.left} suspects left` : "no suspects left: what follows is not marked wrong");
  if (state.per_minute) parts.push(`${state.per_minute} a minute`);
  if (state.last) parts.push(`wrong: ${state.last_wrong} of the last ${state.last} suspects`);
  if (state.disagreements) parts.push(`${state.disagreements} with answers that disagree`);
  $("progress").textContent = parts.join(" · ");
  $("undo").disabled = !state.can_undo;
}

async function run(work) {
  if (busy) return;
  busy = true;
  try {
    await work();
  } catch (error) {
    tellError(error.message);
  } finally {
    busy = false;
  }
}

async function load() {
  const found = await store.next(grid ? GRID : 1);
  items = found.items;
  current = 0;
  showState(found.state);
  render();
}

function give(item, kind, label = "") {
  if (item.answered) return Promise.resolve();
  return run(async () => {
    const found = await store.answer(item, kind, label, grid ? 0 : 1);
    tellError("");
    const said = { class: label, unsure: "unsure", none: "not in any class" }[kind];
    const given = found.hidden.given;
    $("last").textContent = `Row ${found.hidden.row}: ${said}. ${label === given ? "That is its label." : `Its label is ${given}.`}`;
    showState(found.state);
    if (grid) {
      item.answered = said;
      const left = items.findIndex((other, i) => i > current && !other.answered);
      current = left >= 0 ? left : items.findIndex((other) => !other.answered);
      if (current < 0) await load();
      else render();
    } else {
      items = found.items;
      render();
    }
  });
}

function undo() {
  return run(async () => {
    const found = await store.undo();
    showState(found.state);
    if (!found.items.length) return;
    const again = found.items[0];
    $("last").textContent = `Taken back: row ${again.row}.`;
    items = grid ? [again, ...items.filter((item) => !item.answered && item.id !== again.id)] : [again];
    current = 0;
    render();
  });
}

function render() {
  $("main").replaceChildren(items.length ? (grid ? renderGrid() : renderExample(items[0])) : renderEnd());
  if (!items.length) {
    $("status").textContent = "Everything is reviewed.";
    $("main").focus();
    return;
  }
  if (grid) document.querySelectorAll(".tile")[current].focus();
  else $("main").focus({ preventScroll: true });
  if (!grid) window.scrollTo(0, 0);
  $("status").textContent = describe(items[grid ? current : 0]);
}

function describe(item) {
  const content = about.kind === "image" ? "" : item.content.map(([name, value]) => `${name}: ${value}`).join(", ").slice(0, 600);
  if (item.audit) return `Row ${item.row}. Audit: which class is it? ${content}`;
  const suggested = item.suggestions.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return `Row ${item.row}. Given label ${item.given}. Suggested: ${suggested || "the same"}. ${content}`;
}

function renderEnd() {
  const text = about.data
    ? "Everything in this file is reviewed. Save answers.csv and send it back."
    : "Everything is reviewed. Stop the server with Ctrl-C; `logitclip apply` writes the corrected data.";
  return make("p", { class: "card", text });
}

function picture(id, alt, kind) {
  const image = make("img", { class: kind, alt, src: store.picture(id) });
  image.addEventListener("error", () => image.replaceWith(make("p", { class: "nothing soft", text: "This picture cannot be read." })));
  return image;
}

function contents(item) {
  const pairs = item.content.filter(([, value]) => value !== "");
  const wide = about.kind === "table" && pairs.length > 3;
  const list = make("dl", { class: wide ? "content wide" : "content", tabindex: "0", "aria-label": "Content of the row" });
  for (const [name, value] of pairs)
    list.append(make("div", {}, make("dt", { text: name }), make("dd", { text: value, class: value.length > 60 ? "long" : "" })));
  return list;
}

function choice(key, name, share, click, extra = "") {
  const bar = make("span", { class: "bar" });
  if (share) bar.style.width = `${Math.round(100 * share)}%`;
  return make(
    "button",
    { type: "button", class: `choice ${extra}`, onclick: click },
    make("kbd", { text: key, "aria-hidden": "true" }),
    make("span", { class: "name", text: name }),
    make("span", { class: "chance", text: percent(share) }),
    share ? bar : null,
  );
}

// The classes with a button: the suggestions, or in an audit all, so that nothing is suggested.
function buttons(item) {
  if (!item.audit) return item.suggestions.slice(0, grid ? TILE_SUGGESTIONS : undefined);
  return (about.classes.length <= BUTTONS ? about.classes : []).map((name) => [name, null]);
}

// The key of a class. A digit means the same class in every row. With more classes than digits it is the place of a
// suggestion, and in an audit, which has none, there is no key.
function digit(item, name) {
  const names = about.classes.length <= DIGITS.length ? about.classes : item.audit ? [] : buttons(item).map(([name]) => name);
  return DIGITS[names.indexOf(name)] || "";
}

function classButtons(item) {
  return buttons(item).map(([name, share]) => choice(digit(item, name), name, share, () => give(item, "class", name)));
}

function keepButton(item, key) {
  const keys = `${key} ${digit(item, item.given)}`.trim();
  return choice(keys, `Keep ${item.given}`, item.given_probability, () => give(item, "class", item.given), "keep");
}

// What people said who disagree on this row.
function disagreement(item) {
  if (!item.said) return [];
  const said = item.said.map(([who, what]) => `${who || "somebody"} says ${what}`).join(", ");
  return [make("p", { class: "said", text: `You disagree: ${said}. Answer again.` })];
}

function otherButtons(item, none) {
  return make("div", { class: "row" },
    choice("u", "Unsure", null, () => give(item, "unsure")), choice("n", none, null, () => give(item, "none")));
}

function choices(item) {
  const box = make("div", { class: "card choices", role: "group", "aria-label": "Answers" }, ...disagreement(item));
  if (item.audit) {
    box.append(make("h2", { text: "Which class is it?" }));
    box.append(make("p", { class: "soft", text: "A row of the audit: its label and the suggestions are shown after your answer." }));
  } else {
    box.append(make("p", { class: "given" }, "Given label: ", make("strong", { text: item.given })));
    box.append(keepButton(item, "Enter"));
  }
  box.append(...classButtons(item), finder(item), otherButtons(item, "Not in any class"));
  if (!item.audit) box.append(make("p", { class: "soft", text: "Percentages: probabilities by models that have not seen this label." }));
  return box;
}

let finders = 0;
function finder(item, placeholder = "Any class: press c and type") {
  const id = `found-${(finders += 1)}`;
  const list = make("ul", { class: "found", role: "listbox", id, "aria-label": "Classes", hidden: true });
  const input = make("input", {
    role: "combobox", "aria-expanded": "false", "aria-controls": id, "aria-autocomplete": "list", autocomplete: "off",
    spellcheck: "false", "aria-label": "Any class: type a part of its name", placeholder,
  });
  let found = [];
  let chosen = 0;
  const show = () => {
    const typed = input.value.trim().toLowerCase();
    const starts = about.classes.filter((name) => name.toLowerCase().startsWith(typed));
    const holds = about.classes.filter((name) => !name.toLowerCase().startsWith(typed) && name.toLowerCase().includes(typed));
    found = typed ? [...starts, ...holds].slice(0, 50) : [];
    chosen = Math.max(0, Math.min(chosen, found.length - 1));
    list.replaceChildren(...found.map((name, i) =>
      make("li", { role: "option", id: `${id}-${i}`, "aria-selected": String(i === chosen), text: name,
        onmousedown: (event) => { event.preventDefault(); give(item, "class", name); } })));
    if (typed && !found.length) list.append(make("li", { text: "There is no such class." }));
    list.hidden = !typed;
    input.setAttribute("aria-expanded", String(!list.hidden));
    if (found.length) input.setAttribute("aria-activedescendant", `${id}-${chosen}`);
    else input.removeAttribute("aria-activedescendant");
  };
  input.addEventListener("input", () => { chosen = 0; show(); });
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.isComposing) return;
    if (event.key === "Enter" && found.length && !event.repeat) give(item, "class", found[chosen]);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      chosen = (chosen + (event.key === "ArrowDown" ? 1 : found.length - 1)) % Math.max(1, found.length);
      show();
    } else if (event.key === "Escape") { input.value = ""; show(); $("main").focus(); }
  });
  return make("div", { class: "find" }, input, list);
}

function renderExample(item) {
  const shown = make("section", { class: "card", "aria-label": `Row ${item.row}` });
  if (about.kind === "image") {
    shown.append(picture(item.id, `The picture of row ${item.row}`, "picture"));
    shown.append(make("p", { class: "soft", text: item.audit ? "" : item.row }));
  } else {
    shown.append(make("p", { class: "soft", text: `Row ${item.row}` }), contents(item));
  }
  const example = make("div", { class: "example" }, shown, choices(item));
  if (item.neighbours.length) {
    const list = make("ul", { class: "neighbours" });
    for (const near of item.neighbours)
      list.append(make("li", {},
        about.kind === "image" ? picture(near.id, `A similar picture, labelled ${near.label}`, "") : null,
        make("strong", { text: near.label }),
        about.kind === "image" ? null : make("p", { text: near.content.map(([name, value]) =>
          about.kind === "text" ? value : `${name} ${value}`).join(", ").slice(0, 200) })));
    example.append(make("section", { class: "card near" }, make("h2", { text: "Nearest neighbours and their labels" }), list));
  }
  return example;
}

function renderGrid() {
  const list = make("ul", { class: "grid", "aria-label": "Pictures" });
  items.forEach((item, i) => {
    const tile = make("li", { class: item.answered ? "tile done" : "tile", tabindex: i === current ? "0" : "-1", "aria-label": describe(item) });
    const select = () => {
      if (current === i) return;
      document.querySelectorAll(".tile")[current].tabIndex = -1;
      current = i;
      tile.tabIndex = 0;
    };
    tile.addEventListener("focusin", select);
    tile.addEventListener("click", select, true); // not every browser focuses a button that is clicked
    tile.append(picture(item.id, `The picture of row ${item.row}`, ""));
    if (item.answered) tile.append(make("p", { text: `Answer: ${item.answered}` }));
    else {
      tile.append(...disagreement(item));
      if (item.audit) tile.append(make("p", { text: "Audit: which class is it?" }), make("div", { class: "row" }, ...classButtons(item)));
      else tile.append(keepButton(item, "↵"), ...classButtons(item));
      tile.append(finder(item, "Any class: c"), otherButtons(item, "None"));
    }
    list.append(tile);
  });
  return list;
}

function move(key) {
  const tiles = [...document.querySelectorAll(".tile")];
  const top = tiles[0].offsetTop;
  const columns = Math.max(1, tiles.filter((tile) => tile.offsetTop === top).length);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[key];
  tiles[Math.max(0, Math.min(tiles.length - 1, current + step))].focus();
}

function toggleKeys() {
  $("keys").hidden = !$("keys").hidden;
  $("help").setAttribute("aria-expanded", String(!$("keys").hidden));
}

function toggleGrid() {
  if (about.kind !== "image") return Promise.resolve();
  return run(async () => {
    grid = !grid;
    $("view").firstChild.textContent = grid ? "One " : "Grid ";
    await load();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.tagName === "INPUT") return;
  const item = items[grid ? current : 0];
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key; // with Caps Lock, too
  const onButton = event.target.tagName === "BUTTON";
  if ((key === "Enter" || key === " ") && onButton) return; // the button itself
  if (key === "z") undo();
  else if (key === "g") toggleGrid();
  else if (key === "?") toggleKeys();
  else if (!item) return;
  else if (key === "Enter" || key === "k") { if (!item.audit) give(item, "class", item.given); }
  else if (key === "u") give(item, "unsure");
  else if (key === "n") give(item, "none");
  else if (DIGITS.includes(key)) {
    const shown = [...(item.audit ? [] : [item.given]), ...buttons(item).map(([name]) => name)];
    const named = shown.find((name) => digit(item, name) === key);
    if (named !== undefined) give(item, "class", named);
  } else if (key === "c") {
    const place = grid ? document.querySelectorAll(".tile")[current] : $("main");
    const input = place.querySelector(".find input");
    if (input) input.focus();
  } else if (grid && key.startsWith("Arrow")) move(key);
  else return;
  event.preventDefault();
});

$("undo").addEventListener("click", undo);
$("help").addEventListener("click", toggleKeys);
$("view").addEventListener("click", toggleGrid);
$("view").hidden = about.kind !== "image";
$("title").textContent = about.title;
document.title = `Review ${about.title}`;
$("reviewer").value = ofTab("reviewer") || ofBrowser("logitclip-reviewer") || `reviewer-${Math.floor(1000 + 9000 * Math.random())}`;
const rename = () => { ofTab("reviewer", reviewer()); ofBrowser("logitclip-reviewer", reviewer()); };
$("reviewer").addEventListener("change", () => { rename(); run(load); });
$("reviewer").addEventListener("keydown", (event) => { if (event.key === "Enter") $("main").focus(); });
ofTab("reviewer", reviewer());

if (about.data) {
  file.load();
  $("download").hidden = false;
  $("download").addEventListener("click", () => {
    const address = URL.createObjectURL(new Blob([file.csv()], { type: "text/csv" }));
    make("a", { href: address, download: "answers.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    file.saved = file.answers.length;
    file.keep();
  });
  window.addEventListener("beforeunload", (event) => {
    if (file.answers.length > file.saved) event.preventDefault();
  });
}
run(load);
