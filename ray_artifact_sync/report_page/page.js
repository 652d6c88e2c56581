// Draws the report from the JSON in the page. Everything that comes from storage is hostile: it is only ever set as
// text (textContent) or as the source of an <img>, never parsed as HTML.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const TRIALS = DATA.trials;
const SVG = "http://www.w3.org/2000/svg";
const PHONE = matchMedia("(max-width: 760px)");
const MAX_ROWS = 200; // of a table that is opened in place
const MAX_COLUMNS = 30;
const MAX_TEXT = 200000; // characters of a text that is opened in place
const SYNC_STEP = 3; // pixels
const SHOWN = 12; // lines of a list before "Show all"

// --- small helpers ------------------------------------------------------------------------------------

// An element: h("p.note", {title: "x"}, "text", child). Only text and elements go in.
function h(what, attributes, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function s(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
const sum = (list, value) => list.reduce((total, one) => total + (value(one) || 0), 0);
const count = (number) => number.toLocaleString("en");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function size(bytes) {
  let value = bytes || 0;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return unit === "B" ? `${value} B` : `${value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

function duration(seconds) {
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

const DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short", year: "numeric" });
const MONTH_DAY = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const CLOCK = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const EXACT = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

function time(seconds, { exact = false } = {}) {
  if (!seconds) return "time unknown";
  const date = new Date(seconds * 1000);
  return `${DAY.format(date)}, ${(exact ? EXACT : CLOCK).format(date)}`;
}

// A name that may break behind its separators.
function name(text) {
  const pieces = text.split(/(?<=[_,=/-])/);
  return h("span.name", { title: text }, ...pieces.flatMap((piece, at) => (at ? [h("wbr"), piece] : [piece])));
}

// Moments at which a time axis has a line: about one every 90 pixels, at full minutes, hours or days.
function ticks(begin, end, width) {
  const steps = [1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000];
  const step = steps.find((one) => (end - begin) / one <= Math.max(2, width / 90)) || steps[steps.length - 1];
  const zone = new Date(begin * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let t = Math.ceil((begin - zone) / step) * step + zone; t <= end && found.length < 40; t += step) found.push(t);
  const label = (t) => (step < 60 ? EXACT : step < 86400 ? CLOCK : MONTH_DAY).format(new Date(t * 1000));
  return found.map((t) => ({ t, label: label(t) }));
}

// --- what is said of a trial ----------------------------------------------------------------------------

function prepare(trial, number) {
  const saved = trial.checkpoints.map((one) => one.t).filter(Boolean);
  trial.number = number;
  trial.begin = Math.min(...trial.attempts.map((one) => one.begin), ...saved);
  trial.end = Math.max(...trial.attempts.map((one) => one.end), ...saved);
  if (!Number.isFinite(trial.begin)) trial.begin = trial.end = 0;
  const totals = trial.totals;
  trial.saved = Math.max(totals.checkpoints || 0, trial.checkpoints.length);
  trial.pictures = trial.embedded.map((file, at) => ({ ...file, at })).filter((file) => file.sort === "picture");
  trial.texts = trial.embedded.map((file, at) => ({ ...file, at })).filter((file) => file.sort !== "picture");
}

function haystack(trial) {
  if (!trial.haystack) {
    const paths = ["largest", "growing", "skipped", "embedded"].flatMap((list) => trial[list].map((one) => one.path));
    const reasons = trial.skipped.map((one) => `${one.kind} ${one.reason}`);
    const errors = trial.failures.map((one) => one.error);
    const hosts = trial.attempts.map((one) => one.host);
    const saved = trial.checkpoints.map((one) => one.name);
    trial.haystack = [trial.name, trial.error, trial.note, ...paths, ...reasons, ...errors, ...hosts, ...saved].join("\n").toLowerCase();
  }
  return trial.haystack;
}

const content = (trial, at) => byId(`file-${trial.number}-${at}`).textContent;
const isHere = (file) => !file.left_out;
const picture = (trial, file) => `data:${file.mime};base64,${content(trial, file.at)}`;

function text(trial, at) {
  const bytes = Uint8Array.from(atob(content(trial, at)), (character) => character.charCodeAt(0));
  // Marks that reorder what is read are shown as what they are: something that should not be there.
  return new TextDecoder("utf-8").decode(bytes).replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

// --- the timeline ---------------------------------------------------------------------------------------

const MARKS = [
  ["sync", "Sync, higher with more bytes"],
  ["checkpoint", "Checkpoint with its artifacts"],
  ["bare", "Checkpoint without"],
  ["restore", "Restore"],
  ["failure", "Failure"],
  ["killed", "Attempt cut short"],
];

const SHAPES = {
  checkpoint: (x, y) => `M${x} ${y - 4.5}l4 4.5l-4 4.5l-4-4.5z`,
  bare: (x, y) => `M${x} ${y - 4.5}l4 4.5l-4 4.5l-4-4.5z`,
  restore: (x, y) => `M${x - 4} ${y - 4}l7.5 4l-7.5 4z`,
  failure: (x, y) => `M${x - 3.5} ${y - 3.5}l7 7m0-7l-7 7`,
  killed: (x, y) => `M${x} ${y - 6}v12`,
};

function markOf(event) {
  if (event.kind === "failure" || event.error) return event.kind === "checkpoint" ? "bare" : "failure";
  if (event.kind === "checkpoint") return event.exact === false ? "bare" : "checkpoint";
  return event.kind;
}

// What a trial did; read when it is drawn. Checkpoints of a trial without a journal are known from their snapshots only.
function eventsOf(trial) {
  const block = byId(`events-${trial.number}`);
  if (block && !trial.events) trial.events = JSON.parse(block.textContent);
  if (trial.events) return trial.events;
  return trial.checkpoints.filter((one) => one.t).map((one) => ({ kind: "checkpoint", t: one.t, checkpoint: one.name, files: one.files, bytes: one.bytes }));
}

function timeline(trial, { begin, end, width, height }) {
  const span = Math.max(end - begin, 1);
  const x = (t) => 6 + ((t - begin) / span) * (width - 12);
  const events = eventsOf(trial);
  const top = 9;
  const base = height - 3;
  // Syncs closer to each other than a line is wide are one line.
  const lines = new Map();
  for (const event of events) {
    if (event.kind !== "sync") continue;
    const column = Math.round(x(event.t) / SYNC_STEP);
    lines.set(column, (lines.get(column) || 0) + (event.bytes_sent || 0));
  }
  const most = Math.max(1, ...lines.values());
  const paths = { sync: "", checkpoint: "", bare: "", restore: "", failure: "", killed: "" };
  const svg = s("svg", { class: "timeline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const { t } of ticks(begin, end, width)) svg.append(s("line", { class: "grid", x1: x(t).toFixed(1), x2: x(t).toFixed(1), y1: 0, y2: height }));
  trial.attempts.forEach((attempt, at) => {
    const left = x(attempt.begin) - 2;
    svg.append(s("rect", { class: "attempt", x: left.toFixed(1), y: top, width: Math.max(3, x(attempt.end) - left + 2).toFixed(1), height: base - top, rx: 2 }));
    if (!attempt.closed && at < trial.attempts.length - 1) paths.killed += SHAPES.killed((x(attempt.end) + 2).toFixed(1), (top + base) / 2);
  });
  for (const [column, bytes] of lines) {
    const high = 2 + Math.cbrt(bytes / most) * (base - top - 4); // the cube root: small ones stay to be seen
    paths.sync += `M${column * SYNC_STEP} ${base}v${(-high).toFixed(1)}`;
  }
  for (const event of events) {
    const mark = markOf(event);
    if (mark !== "sync" && SHAPES[mark]) paths[mark] += SHAPES[mark](Number(x(event.t).toFixed(1)), top - 2);
  }
  for (const [mark, d] of Object.entries(paths)) if (d) svg.append(s("path", { class: `mark ${mark}`, d }));
  return svg;
}

function axis({ begin, end, width }) {
  const x = (t) => 6 + ((t - begin) / Math.max(end - begin, 1)) * (width - 12);
  const svg = s("svg", { class: "ticks", width, height: 16, viewBox: `0 0 ${width} 16`, "aria-hidden": "true" });
  for (const { t, label } of ticks(begin, end, width)) {
    const at = x(t);
    svg.append(textAt(at, 12, label, `tick ${at > width - 30 ? "end" : at > 20 ? "middle" : ""}`));
  }
  return svg;
}

function timelineInWords(trial) {
  if (trial.error) return "";
  const totals = trial.totals;
  return `${time(trial.begin)} to ${time(trial.end)}: ${plural(totals.syncs || 0, "sync")}, ${plural(trial.saved, "checkpoint")}, ${plural(totals.restores || 0, "restore")}, ${plural(totals.failures || 0, "failure")}`;
}

// --- the rows -------------------------------------------------------------------------------------------

const COLUMNS = [
  { key: "name", label: "Trial", value: (trial) => trial.name, text: true },
  { key: "begin", label: "When", value: (trial) => trial.begin || 1e12 },
  { key: "bytes", label: "Stored", value: (trial) => trial.bytes || 0 },
  { key: "sent", label: "Sent / changed", value: (trial) => trial.totals.bytes_sent || 0 },
  { key: "saved", label: "Checkpoints", value: (trial) => trial.saved },
  { key: "failures", label: "Failures", value: (trial) => (trial.error || trial.damaged ? 1e12 : (trial.totals.failures || 0) * 1e6 + (trial.totals.retries || 0)) },
];
const state = { sort: "begin", down: false, search: "", open: new Set() };
const rows = new Map();
let domain = { begin: 0, end: 1 };
let lane = 300;

const soon = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      soon.unobserve(entry.target);
      entry.target.fill();
    }
  },
  { rootMargin: "400px" },
);

// Fills an element when it comes near the window.
function lazily(element, fill) {
  element.fill = fill;
  soon.observe(element);
  return element;
}

function thumbnail(trial, file, className) {
  const image = h(`img.${className}`, { alt: "", decoding: "async" });
  const button = h("button.thumb", { type: "button", title: `${file.path}, ${size(file.size)}`, "aria-label": `Open ${file.path}`, onclick: (event) => (event.stopPropagation(), view(trial, file)) }, image);
  return lazily(button, () => {
    image.src = picture(trial, file);
  });
}

function row(trial) {
  const totals = trial.totals;
  const toggle = h("button.toggle", { type: "button", "aria-expanded": "false", onclick: () => open(trial) }, h("span.chevron", { "aria-hidden": "true" }), name(trial.name));
  const lines = trial.error
    ? [h("span.bad", {}, "Cannot be read")]
    : [trial.attempts.length > 1 ? plural(trial.attempts.length, "attempt") : "", trial.end ? duration(trial.end - trial.begin) : "", trial.journal ? "" : "no journal"].filter(Boolean);
  const shown = trial.pictures.filter(isHere);
  const cells = [
    h(".cell.who", { role: "cell" }, toggle, h("p.under", {}, ...lines.flatMap((line, at) => (at ? [" · ", line] : [line])))),
    h(".cell.when", { role: "cell" }, trial.error ? h("p.error-line", {}, trial.error) : lane_(trial)),
    h(".cell.stored", { role: "cell" }, h("span.figure", {}, size(trial.bytes)), h("span.under", {}, plural(trial.files || 0, "file"))),
    h(".cell.sent", { role: "cell" }, trial.journal ? sentBars(totals) : h("span.under", {}, "unknown")),
    h(".cell.saved", { role: "cell" }, h("span.figure", {}, count(trial.saved)), h("span.under.label", {}, trial.saved === 1 ? "checkpoint" : "checkpoints"), h("span.under", {}, trial.error || trial.checkpoints.length === trial.saved ? "" : `${count(trial.checkpoints.length)} kept`)),
    h(".cell.trouble", { role: "cell" }, troubles(trial)),
    shown.length ? h(".cell.pictures", { role: "cell" }, ...shown.slice(0, 2).map((file) => thumbnail(trial, file, "small")), shown.length > 2 ? h("span.under", {}, `+${shown.length - 2}`) : "") : h(".cell.pictures", { role: "cell" }),
  ];
  const line = h(".line", { role: "row" }, ...cells);
  line.addEventListener("click", (event) => {
    if (!event.target.closest("button, a") && !String(getSelection())) open(trial);
  });
  const element = h(".trial", { role: "rowgroup", "data-trial": trial.number }, line);
  rows.set(trial, { element, toggle });
  return element;
}

function lane_(trial) {
  const holder = h(".lane", { role: "img", "aria-label": timelineInWords(trial), title: timelineInWords(trial) });
  const draw = () => holder.replaceChildren(timeline(trial, { ...domain, width: lane, height: 38 }));
  holder.draw = draw;
  return lazily(holder, draw);
}

function sentBars(totals) {
  const sent = totals.bytes_sent || 0;
  const changed = totals.bytes_changed || 0;
  const most = Math.max(sent, changed, 1);
  const bar = (what, value) => {
    const fill = h(`span.fill.${what}`, {});
    fill.style.width = `${Math.max((value / most) * 100, value ? 2 : 0)}%`;
    return h("span.meter", { "aria-hidden": "true" }, fill);
  };
  return h(
    ".pair",
    { title: `${size(sent)} sent, ${size(changed)} changed` },
    h("span.figure", {}, size(sent), h("span.unseen", {}, " sent, "), h("span.under", {}, ` / ${size(changed)}`), h("span.unseen", {}, " changed")),
    bar("is-sent", sent),
    bar("is-changed", changed),
  );
}

function troubles(trial) {
  const totals = trial.totals;
  const said = [];
  if (trial.error) said.push(h("span.chip.bad", {}, "unreadable"));
  if (trial.damaged) said.push(h("span.chip.bad", {}, "damaged list"));
  if (totals.failures) said.push(h("span.chip.bad", {}, plural(totals.failures, "failure")));
  if (totals.retries) said.push(h("p.under", {}, `${count(totals.retries)} ${totals.retries === 1 ? "retry" : "retries"}`));
  if (trial.skipped.length) said.push(h("p.under", {}, `${plural(trial.skipped.length, "file")} skipped`));
  return said.length ? said : h("span.under.none", {}, trial.journal ? "none" : "");
}

function headings() {
  const cells = COLUMNS.map((column) => {
    const active = state.sort === column.key;
    const button = h("button", { type: "button", onclick: () => sortBy(column.key) }, column.label, h("span.arrow", { "aria-hidden": "true" }, active ? (state.down ? "↓" : "↑") : ""));
    const cell = h(`.cell.${cellOf(column.key)}`, { role: "columnheader", "aria-sort": active ? (state.down ? "descending" : "ascending") : "none" }, button);
    if (column.key === "begin") cell.append(h("span.axis-of-all", {}, axis({ ...domain, width: lane })));
    return cell;
  });
  return h(".line.headings", { role: "row" }, ...cells, h(".cell.pictures", { role: "columnheader" }, "Pictures"));
}

const cellOf = (key) => ({ name: "who", begin: "when", bytes: "stored", sent: "sent", saved: "saved", failures: "trouble" })[key];

function sortBy(key, down = state.sort === key ? !state.down : COLUMNS.find((column) => column.key === key).text !== true && key !== "begin") {
  state.sort = key;
  state.down = down;
  byId("order").value = `${key}:${down ? "down" : "up"}`;
  arrange();
}

function arrange() {
  const { value } = COLUMNS.find((column) => column.key === state.sort);
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = TRIALS.filter((trial) => words.every((word) => haystack(trial).includes(word)));
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => {
    const [first, second] = [value(a), value(b)];
    const order = typeof first === "string" ? collator.compare(first, second) : first - second;
    return (state.down ? -order : order) || collator.compare(a.name, b.name);
  };
  const holder = byId("rows");
  holder.replaceChildren(headings(), ...found.sort(compare).map((trial) => rows.get(trial).element));
  if (!found.length) holder.append(h("p.empty", {}, `Nothing matches “${state.search}”.`));
  byId("found").textContent = words.length ? `${count(found.length)} of ${plural(TRIALS.length, "trial")}` : "";
}

// --- one trial, opened ------------------------------------------------------------------------------------

function open(trial) {
  const { element, toggle } = rows.get(trial);
  const isOpen = state.open.has(trial);
  if (isOpen) {
    state.open.delete(trial);
    element.querySelector(".details").remove();
  } else {
    state.open.add(trial);
    element.append(details(trial));
  }
  element.classList.toggle("is-open", !isOpen);
  toggle.setAttribute("aria-expanded", String(!isOpen));
}

function details(trial) {
  if (trial.error) return h(".details", {}, h("p.notice.bad", {}, trial.error));
  const columns = [
    trial.journal && trial.totals.syncs ? block("Bytes sent and bytes changed, summed up", () => bytesChart(trial)) : "",
    trial.checkpoints.length ? block(`Checkpoints (${count(trial.checkpoints.length)} kept)`, () => checkpointTable(trial)) : "",
    trial.largest.length ? block("Largest files", () => bars(trial.largest, (one) => one.size, (one) => size(one.size))) : "",
    trial.growing.length ? block("Fastest growing files", () => growing(trial.growing)) : "",
    trial.failures.length ? block(`Failures (${count(trial.failures_in_all)})`, () => failures(trial.failures)) : "",
    trial.skipped.length ? block(`Not synced (${count(trial.skipped.length)})`, () => skips(trial.skipped)) : "",
  ];
  return h(
    ".details",
    {},
    trial.note ? h(`p.notice${trial.damaged ? ".bad" : ""}`, {}, trial.note) : "",
    journalNotice(trial),
    eventsOf(trial).length ? block("Timeline", () => bigTimeline(trial)) : "",
    h(".columns", {}, ...columns),
    pictureBlock(trial),
    textBlock(trial),
  );
}

const block = (title, fill) => h("section.block", {}, h("h3", {}, title), fill());

function journalNotice(trial) {
  const journal = trial.journal;
  if (!journal || !(journal.damaged || journal.unknown || journal.cut)) return "";
  const parts = [];
  if (journal.damaged) parts.push(`${plural(journal.damaged, "line")} of the journal could not be read`);
  if (journal.unknown) parts.push(`${plural(journal.unknown, "line")} of it are of a newer release`);
  if (journal.cut) parts.push("it is longer than what is shown");
  return h("p.notice", {}, `${parts.join("; ")}.`);
}

function bigTimeline(trial) {
  const holder = h(".big", {});
  const tip = h("p.tip", {}, h("span.under", {}, "Point at the timeline to read what happened."));
  const events = eventsOf(trial);
  const draw = () => {
    const width = Math.max(260, holder.clientWidth || lane);
    const begin = trial.begin;
    const end = Math.max(trial.end, trial.begin + 1);
    const svg = timeline(trial, { begin, end, width, height: 72 });
    const cursor = s("line", { class: "cursor", y1: 0, y2: 72, x1: -10, x2: -10 });
    svg.append(cursor);
    const show = (pointer) => {
      const at = begin + ((pointer.clientX - svg.getBoundingClientRect().left - 6) / (width - 12)) * (end - begin);
      const event = events.reduce((best, one) => (!best || Math.abs(one.t - at) < Math.abs(best.t - at) ? one : best), null);
      if (!event) return;
      const x = 6 + ((event.t - begin) / (end - begin)) * (width - 12);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      tip.textContent = inWords(event);
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    holder.replaceChildren(svg, axis({ begin, end, width }), h("p.under", {}, `${time(begin)} to ${time(end)}, ${duration(end - begin)}`));
  };
  holder.draw = draw;
  requestAnimationFrame(draw);
  const all = h("details.all", {}, h("summary", {}, `All ${plural(events.length, "event")}`));
  all.addEventListener("toggle", () => {
    if (all.open && all.children.length === 1) all.append(more(events.slice().reverse(), (event) => h(`li.${markOf(event)}`, {}, h("span.under", {}, time(event.t, { exact: true })), " ", inWords(event, { when: false })), 100));
  });
  return h("div", {}, holder, tip, all);
}

function inWords(event, { when = true } = {}) {
  const said = [];
  const what = { begin: "Began", sync: event.syncs ? `${count(event.syncs)} syncs` : "Sync", checkpoint: `Checkpoint ${event.checkpoint || ""}`, restore: `Restored ${event.checkpoint || ""}`, failure: "Failure", close: "Ended" }[event.kind];
  if (event.files_sent) said.push(`${plural(event.files_sent, "file")}, ${size(event.bytes_sent)} sent, ${size(event.bytes_changed)} changed`);
  if (event.files_read || event.files_local) said.push(`${plural(event.files_read || 0, "file")} (${size(event.bytes_read)}) from storage, ${count(event.files_local || 0)} from this node`);
  if (event.seconds) said.push(`took ${duration(event.seconds)}`);
  if (event.retries) said.push(`${count(event.retries)} tried again`);
  if (event.failed) said.push(`${plural(event.failed, "file")} failed`);
  if (event.exact === false) said.push(event.kind === "restore" ? "not as of the checkpoint" : "without its artifacts");
  if (event.repeats) said.push(`${count(event.repeats + 1)} times`);
  if (event.error) said.push(event.error);
  return `${when ? `${time(event.t, { exact: true })}  ` : ""}${what}${said.length ? `: ${said.join("; ")}` : ""}`;
}

// Two step lines over time: what was sent, and what had changed.
function bytesChart(trial) {
  const holder = h(".drawn", {});
  holder.draw = () => holder.replaceChildren(chart(trial, Math.max(260, holder.clientWidth || 520)));
  requestAnimationFrame(holder.draw);
  const { bytes_sent: sent = 0, bytes_changed: changed = 0 } = trial.totals;
  const ratio = changed ? ` ${(sent / changed).toFixed(sent / changed < 10 ? 2 : 0)} bytes were sent for each that changed.` : "";
  return h("figure", {}, holder, h("figcaption", {}, h("span.key.is-sent", {}), `${size(sent)} sent`, h("span.key.is-changed", {}), `${size(changed)} changed.${ratio}`));
}

function chart(trial, width) {
  const height = 180;
  const syncs = eventsOf(trial).filter((event) => event.kind === "sync");
  let sent = 0;
  let changed = 0;
  const points = syncs.map((event) => ({ t: event.t, sent: (sent += event.bytes_sent || 0), changed: (changed += event.bytes_changed || 0) }));
  const begin = trial.begin;
  const span = Math.max(trial.end - begin, 1);
  const most = Math.max(sent, changed, 1);
  const x = (t) => 4 + ((t - begin) / span) * (width - 8);
  const y = (value) => height - 22 - (value / most) * (height - 40);
  const line = (key) => points.reduce((d, point) => `${d}H${x(point.t).toFixed(1)}V${y(point[key]).toFixed(1)}`, `M${x(begin)} ${y(0)}`) + `H${width - 4}`;
  const svg = s("svg", { class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${size(sent)} sent, ${size(changed)} changed` });
  for (const share of [0, 0.5, 1]) {
    const at = y(most * share);
    svg.append(s("line", { class: "grid", x1: 4, x2: width - 4, y1: at, y2: at }));
    if (share) svg.append(textAt(6, at - 4, size(Math.round(most * share)), "tick"));
  }
  svg.append(s("path", { class: "line-changed", d: line("changed") }), s("path", { class: "line-sent", d: line("sent") }));
  for (const { t, label } of ticks(begin, begin + span, width)) {
    const at = x(t);
    svg.append(textAt(at, height - 6, label, `tick ${at > width - 30 ? "end" : at > 20 ? "middle" : ""}`));
  }
  return svg;
}

function textAt(x, y, what, className) {
  const element = s("text", { x, y, class: className });
  element.textContent = what;
  return element;
}

function checkpointTable(trial) {
  const line = (one) => h("tr", {}, h("td", {}, name(one.name)), h("td", {}, one.t ? time(one.t) : ""), h("td.number", {}, count(one.files)), h("td.number", {}, size(one.bytes)), h("td.number", {}, count(one.files_changed)));
  const body = h("tbody", {}, ...trial.checkpoints.slice().reverse().map(line));
  const heading = (label, number) => h(number ? "th.number" : "th", { scope: "col" }, label);
  return h(".scroll", { tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, heading("Name"), heading("Saved"), heading("Files", true), heading("Bytes", true), heading("Changed files", true))), body));
}

// A list with bars behind its lines.
function bars(list, value, label, { where = false } = {}) {
  const most = Math.max(1, ...list.map(value));
  return more(list, (one) => {
    const fill = h("span.behind", { "aria-hidden": "true" });
    fill.style.width = `${(value(one) / most) * 100}%`;
    return h("li.barred", {}, fill, h("span.what", {}, name(one.path), where ? h("span.under", {}, one.trial) : ""), h("span.figure", {}, label(one)));
  });
}

const growing = (list, options) =>
  bars(list, (one) => one.per_hour, (one) => `${size(one.from)} → ${size(one.size)}, ${size(one.per_hour)}/h`, options);

function failures(list, { where = false } = {}) {
  return more(list.slice().reverse(), (one) =>
    h("li", {}, h("span.under", {}, time(one.t, { exact: true }), where ? ` · ${one.trial}` : "", one.checkpoint ? ` · ${one.checkpoint}` : "", one.times > 1 ? ` · ${count(one.times)} times` : ""), h("p.error-line", {}, one.error)),
  );
}

const KINDS = {
  excluded: "Excluded by a pattern",
  owned: "Owned by the driver",
  unsupported: "Not a regular file",
  unreadable: "Unreadable",
  vanished: "Deleted before it could be sent",
  invalid: "Name that storages refuse",
  unstable: "Written all the time",
};

const skips = (list) => more(list, (one) => h("li.skip", {}, h("span.chip", {}, KINDS[one.kind] || one.kind), name(one.path), h("span.under", {}, one.reason)));

// A list that shows its beginning, and the rest when asked.
function more(list, line, first = SHOWN) {
  const holder = h("ul.list", {}, ...list.slice(0, first).map(line));
  if (list.length <= first) return holder;
  const button = h("button.more", { type: "button", onclick: () => (holder.append(...list.slice(first).map(line)), button.remove()) }, `Show all ${count(list.length)}`);
  return h("div", {}, holder, button);
}

// --- pictures and texts -------------------------------------------------------------------------------------

function pictureBlock(trial) {
  if (!trial.pictures.length) return "";
  const shown = trial.pictures.filter(isHere);
  const grid = h(".gallery", {}, ...shown.map((file) => h("figure", {}, thumbnail(trial, file, "large"), h("figcaption", {}, name(file.path)))));
  return h("section.block", {}, h("h3", {}, `Pictures (${count(shown.length)})`), grid, leftOut(trial.pictures, trial, trial.not_embedded.pictures, "picture"));
}

function textBlock(trial) {
  if (!trial.texts.length) return "";
  const shown = trial.texts.filter(isHere);
  const list = shown.map((file) => {
    const holder = h("details.file", {}, h("summary", {}, name(file.path), h("span.under", {}, size(file.size))));
    holder.addEventListener("toggle", () => {
      if (holder.open && holder.children.length === 1) holder.append(file.sort === "table" ? tableOf(trial, file) : textOf(trial, file));
    });
    return holder;
  });
  return h("section.block", {}, h("h3", {}, `Texts and tables (${count(shown.length)})`), ...list, leftOut(trial.texts, trial, trial.not_embedded.texts, "text"));
}

// What could be shown and is not in the page, and why.
function leftOut(files, trial, others, noun) {
  const out = files.filter((file) => !isHere(file));
  if (!out.length && !others) return "";
  const holder = h("details.all", {}, h("summary", {}, `${plural(out.length + others, noun)} not in this page`));
  if (out.length) holder.append(more(out, (file) => h("li", {}, name(file.path), " ", h("span.under", {}, `${size(file.size)}: ${file.left_out}`))));
  if (others) holder.append(h("p.under", {}, `${plural(others, "more " + noun)}: only the newest of each trial are in the page.`));
  return holder;
}

function textOf(trial, file) {
  const whole = text(trial, file.at);
  const holder = h("div", {}, h("pre", { tabindex: 0 }, whole.slice(0, MAX_TEXT)));
  if (whole.length > MAX_TEXT) holder.append(h("p.under", {}, `The first ${count(MAX_TEXT)} of ${count(whole.length)} characters.`));
  return holder;
}

function tableOf(trial, file) {
  const whole = parseTable(text(trial, file.at), file.path.toLowerCase().endsWith(".tsv") ? "\t" : ",");
  if (!whole.length) return h("p.under", {}, "The file is empty.");
  const [first, ...rest] = whole;
  const cut = (cells) => cells.slice(0, MAX_COLUMNS);
  const isNumber = (cell) => /^-?[\d.]+(e[+-]?\d+)?$/i.test(cell || "");
  const numbers = cut(first).map((_, at) => rest.length > 0 && rest.slice(0, MAX_ROWS).every((cells) => !cells[at] || isNumber(cells[at])));
  const head = h("thead", {}, h("tr", {}, ...cut(first).map((cell, at) => h(numbers[at] ? "th.number" : "th", { scope: "col" }, cell))));
  const body = h("tbody", {}, ...rest.slice(0, MAX_ROWS).map((cells) => h("tr", {}, ...cut(cells).map((cell, at) => h(numbers[at] ? "td.number" : "td", {}, cell)))));
  const holder = h("div", {}, h(".scroll", { tabindex: 0 }, h("table.data", {}, head, body)));
  if (rest.length > MAX_ROWS || first.length > MAX_COLUMNS) holder.append(h("p.under", {}, `${count(Math.min(rest.length, MAX_ROWS))} of ${plural(rest.length, "row")}, ${count(Math.min(first.length, MAX_COLUMNS))} of ${plural(first.length, "column")}.`));
  return holder;
}

// CSV as RFC 4180 has it: quotes around cells, doubled inside.
function parseTable(whole, separator) {
  const lines = [];
  let cells = [];
  let cell = "";
  let quoted = false;
  for (let at = 0; at < whole.length; at += 1) {
    const character = whole[at];
    if (quoted) {
      if (character !== '"') cell += character;
      else if (whole[at + 1] === '"') cell += whole[(at += 1)];
      else quoted = false;
    } else if (character === '"' && !cell) quoted = true;
    else if (character === separator || character === "\n") {
      cells.push(cell.endsWith("\r") ? cell.slice(0, -1) : cell);
      cell = "";
      if (character === "\n") {
        lines.push(cells);
        cells = [];
      }
    } else cell += character;
  }
  if (cell || cells.length) lines.push([...cells, cell]);
  return lines;
}

function view(trial, file) {
  const dialog = byId("viewer");
  const shown = trial.pictures.filter(isHere);
  const step = (by) => view(trial, shown[(shown.findIndex((one) => one.at === file.at) + by + shown.length) % shown.length]);
  const button = (label, sign, act) => h("button.step", { type: "button", "aria-label": label, onclick: act }, sign);
  dialog.replaceChildren(
    h("header", {}, h("p.what", {}, name(file.path), h("span.under", {}, `${trial.name} · ${size(file.size)}`)), button("Close", "×", () => dialog.close())),
    h(".stage", {}, h("img", { src: picture(trial, file), alt: file.path })),
    shown.length > 1 ? h("nav", {}, button("Previous picture", "←", () => step(-1)), h("span.under", {}, `${shown.findIndex((one) => one.at === file.at) + 1} of ${shown.length}`), button("Next picture", "→", () => step(1))) : "",
  );
  dialog.onkeydown = (event) => {
    if (shown.length > 1 && (event.key === "ArrowLeft" || event.key === "ArrowRight")) step(event.key === "ArrowLeft" ? -1 : 1);
  };
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close();
  };
  if (!dialog.open) dialog.showModal();
}

// --- the experiment as a whole --------------------------------------------------------------------------------

function figures() {
  const readable = TRIALS.filter((trial) => !trial.error);
  const total = (key) => sum(readable, (trial) => trial.totals[key]);
  const sent = total("bytes_sent");
  const changed = total("bytes_changed");
  const known = readable.some((trial) => trial.journal);
  const figure = (label, value, under = "", className = "") => h(`div${className}`, {}, h("dt", {}, label), h("dd", {}, value, under ? h("span.under", {}, under) : ""));
  const wrong = total("failures") + TRIALS.length - readable.length;
  byId("figures").replaceChildren(
    figure("Trials", count(TRIALS.length), domain.end > domain.begin ? `over ${duration(domain.end - domain.begin)}` : ""),
    figure("Stored", size(sum(readable, (trial) => trial.bytes)), plural(sum(readable, (trial) => trial.files), "file")),
    figure("Sent", known ? size(sent) : "–", known ? plural(total("files_sent"), "file") : "no journal"),
    figure("Changed", known ? size(changed) : "–", known && changed ? `${(sent / changed).toFixed(2)} sent per byte` : ""),
    figure("Checkpoints", count(sum(readable, (trial) => trial.saved)), total("restores") ? plural(total("restores"), "restore") : ""),
    figure("Failures", count(wrong), `${count(total("retries"))} ${total("retries") === 1 ? "retry" : "retries"}`, wrong ? ".is-bad" : ""),
  );
}

function notices() {
  const unreadable = TRIALS.filter((trial) => trial.error).length;
  const silent = TRIALS.filter((trial) => !trial.error && !trial.journal).length;
  const said = [];
  if (unreadable) said.push(h("p.notice.bad", {}, `${plural(unreadable, "trial")} of ${count(TRIALS.length)} cannot be read; the reason is in the row.`));
  if (silent) said.push(h("p.notice", {}, `${silent === TRIALS.length ? "No trial has" : `${plural(silent, "trial")} of ${count(TRIALS.length)} ${silent === 1 ? "has" : "have"} no`}${silent === TRIALS.length ? " a" : ""} journal: what was sent, retried, failed or skipped there is unknown. Checkpoints and files are shown.`));
  byId("notices").replaceChildren(...said);
}

function experiment() {
  if (TRIALS.length < 2) return;
  const all = (key) => TRIALS.flatMap((trial) => trial[key].map((one) => ({ ...one, trial: trial.name })));
  const largest = all("largest").sort((a, b) => b.size - a.size).slice(0, 15);
  const fastest = all("growing").sort((a, b) => b.per_hour - a.per_hour).slice(0, 15);
  const wrong = all("failures").sort((a, b) => a.t - b.t).slice(-200);
  const reasons = new Map();
  for (const one of all("skipped")) {
    const key = `${one.kind}\n${one.reason}`;
    const group = reasons.get(key) || { ...one, files: 0, trials: new Set() };
    group.files += 1;
    group.trials.add(one.trial);
    reasons.set(key, group);
  }
  const groups = [...reasons.values()].sort((a, b) => b.files - a.files);
  byId("experiment").replaceChildren(
    h("h2", {}, "All trials together"),
    h(
      ".columns",
      {},
      largest.length ? block("Largest files", () => bars(largest, (one) => one.size, (one) => size(one.size), { where: true })) : "",
      fastest.length ? block("Fastest growing files", () => growing(fastest, { where: true })) : "",
      wrong.length ? block("Failures", () => failures(wrong, { where: true })) : "",
      groups.length ? block("Not synced, by reason", () => more(groups, (group) => h("li.skip", {}, h("span.chip", {}, KINDS[group.kind] || group.kind), h("span.what", {}, group.reason), h("span.under", {}, `${plural(group.files, "file")} in ${plural(group.trials.size, "trial")}, such as ${group.path}`)))) : "",
    ),
  );
}

function legend() {
  const sample = (mark) => {
    const svg = s("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" });
    svg.append(s("path", { class: `mark ${mark}`, d: mark === "sync" ? "M4 14v-5M8 14v-10M12 14v-7" : SHAPES[mark](8, 8) }));
    return svg;
  };
  byId("legend").replaceChildren(...MARKS.map(([mark, label]) => h("li", {}, sample(mark), label)));
}

// --- putting it together ----------------------------------------------------------------------------------------

function measure() {
  const cell = document.querySelector(".trial .cell.when");
  return cell ? Math.max(200, Math.floor(cell.clientWidth)) : 300;
}

function redraw() {
  const width = measure();
  const changed = width !== lane;
  lane = width;
  for (const holder of document.querySelectorAll(".lane, .big, .drawn")) {
    if (holder.firstChild && (changed || !holder.classList.contains("lane"))) holder.draw();
  }
  const heading = document.querySelector(".axis-of-all");
  if (heading) heading.replaceChildren(axis({ ...domain, width }));
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  byId("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
}

function start() {
  TRIALS.forEach(prepare);
  const timed = TRIALS.filter((trial) => trial.begin);
  if (timed.length) domain = { begin: Math.min(...timed.map((trial) => trial.begin)), end: Math.max(...timed.map((trial) => trial.end)) };
  byId("place").textContent = DATA.uri;
  byId("foot").textContent = `Made ${time(DATA.made)} by ray-artifact-sync ${DATA.version}. Times are this device's; this file loads nothing from anywhere.`;
  figures();
  notices();
  legend();
  theme();
  byId("rows").setAttribute("role", "table");
  byId("rows").setAttribute("aria-label", "Trials");
  TRIALS.forEach(row);
  const order = byId("order");
  for (const column of COLUMNS) {
    for (const [direction, sign] of column.text || column.key === "begin" ? [["up", "↑"], ["down", "↓"]] : [["down", "↓"], ["up", "↑"]]) {
      order.append(h("option", { value: `${column.key}:${direction}` }, `${column.label} ${sign}`));
    }
  }
  order.value = `${state.sort}:up`;
  order.addEventListener("change", () => sortBy(order.value.split(":")[0], order.value.endsWith(":down")));
  byId("search").addEventListener("input", (event) => {
    state.search = event.target.value.trim();
    arrange();
  });
  arrange();
  redraw();
  experiment();
  if (TRIALS.length === 1) open(TRIALS[0]);
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });
  document.documentElement.dataset.ready = "yes";
}

start();
