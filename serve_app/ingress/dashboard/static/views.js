// The parts of the page, each made from the picture that the server sends.

import { chart } from "./charts.js";
import { h } from "./dom.js";
import * as f from "./format.js";

// One sentence: what an owner would want to be told first.
export function summary({ now, macs, hour }) {
  const silent = macs.filter((mac) => !mac.answers).map((mac) => mac.host);
  const parts = [];
  if (!macs.length) return "No Mac answers. Requests are refused until one does.";
  if (silent.length) parts.push(`${silent.join(" and ")} ${silent.length === 1 ? "does" : "do"} not answer.`);
  const draining = macs.filter((mac) => mac.answers && mac.draining).map((mac) => mac.host);
  if (draining.length) parts.push(`${draining.join(" and ")} finishes what runs and takes nothing new.`);
  if (!silent.length && now.macs_ready === now.macs) {
    parts.push(now.macs === 1 ? "The Mac is ready." : `All ${now.macs} Macs are ready.`);
  } else parts.push(`${now.macs_ready} of ${f.plural(now.macs, "Mac is", "Macs are")} ready.`);
  if (now.waiting) {
    parts.push(`${f.plural(now.waiting, "request waits", "requests wait")}; ${f.newcomer(now.predicted_wait_s)}.`);
  } else parts.push("Nobody waits.");
  if (hour.failed) parts.push(`${f.plural(hour.failed, "call", "calls")} failed in the last hour.`);
  return parts.join(" ");
}

export function figures({ now, hour }) {
  return [
    figure("Tokens a second", f.rate(now.tokens_per_s), "written now"),
    figure("Slots in use", [f.count(now.running), h("small", {}, ` of ${f.count(now.slots)}`)],
      h("span", { class: "meter", "aria-hidden": "true" },
        h("i", { style: { width: `${now.slots ? (100 * now.running) / now.slots : 0}%` } }))),
    figure("Waiting", f.count(now.waiting), `newcomer: ${startsIn(now.predicted_wait_s)}`, now.waiting > 0 && "busy"),
    figure("First token", f.seconds(hour.ttft_s.p50), `p95 ${f.seconds(hour.ttft_s.p95)} · last hour`),
    figure("Between tokens", f.seconds(hour.gap_s.p50), `p95 ${f.seconds(hour.gap_s.p95)} · last hour`),
    figure("Found in cache", f.percent(hour.cached_tokens, hour.prompt_tokens),
      `of ${f.count(hour.prompt_tokens)} · last hour`),
    figure("Errors", f.count(hour.failed), `of ${f.plural(hour.calls, "call", "calls")} · last hour`,
      hour.failed > 0 && "bad"),
  ];
}

function startsIn(seconds) {
  return seconds != null && seconds < 0.05 ? "at once" : f.seconds(seconds);
}

function figure(name, value, note, mood) {
  return h("div", { class: `figure ${mood || ""}`, "data-key": name },
    h("h2", {}, name), h("p", { class: "value" }, value), h("p", { class: "note" }, note));
}

// --- Macs --------------------------------------------------------------------------------------------------------

export function macs(list) {
  return list.length ? list.map(mac) : [h("p", { class: "card empty" }, "No Mac answers.")];
}

function mac(it) {
  const [state, mood] = stateOf(it);
  return h("article", { class: `card mac ${it.answers ? "" : "stale"}`, "data-key": it.replica, "aria-label": it.host },
    h("div", { class: "head" },
      h("h3", {}, it.host, h("small", {}, ` ${it.model}`)),
      h("span", { class: `pill ${mood}` }, state)),
    it.last_failure && it.restarts > 0 && h("p", { class: "note" }, `Restarted ${it.restarts}×: ${it.last_failure}`),
    h("ol", { class: `slots ${it.slots.length > 16 ? "many" : ""}`, "aria-label": `Slots of ${it.host}` }, it.slots.map(slot)),
    h("dl", { class: "facts" },
      fact("writing", `${f.rate(it.tokens_per_s)} tok/s`),
      fact("waiting", it.num_waiting ? reasons(it.waiting_on) : "nobody"),
      fact("newcomer waits", f.seconds(it.predicted_wait_s))),
    it.memory ? memory(it.memory, it.host) : h("p", { class: "note" }, "Memory: not known."));
}

function stateOf(it) {
  if (!it.answers) return [`silent for ${f.seconds(it.silent_s)}`, "bad"];
  if (it.draining) return ["draining", "busy"];
  if (!it.ready) return [it.state, "busy"];
  return ["ready", "good"];
}

function reasons(waitingOn) {
  return Object.entries(waitingOn).map(([name, number]) => `${f.count(number)} for ${f.reason(name)}`).join(", ");
}

function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function slot(it, place) {
  if (!it) return h("li", { class: "slot free", "data-key": `free-${place}` }, h("span", {}, `${place}`), h("span", {}, "free"));
  const read = Math.min(1, it.num_computed_tokens / Math.max(1, it.num_prompt_tokens));
  const texts = {
    prefill: ["reading", `${Math.round(100 * read)} % of ${f.count(it.num_prompt_tokens)}`],
    decode: ["writing", f.plural(it.num_output_tokens, "token", "tokens")],
    waiting: ["waiting", `for ${f.reason(it.waits_for)}`],
  };
  const [verb, detail] = texts[it.phase];
  const title = `${it.user || "somebody"}, ${verb}, ${detail}; prompt of ${f.count(it.num_prompt_tokens)} tokens, `
    + `${f.count(it.num_cached_tokens)} from the cache; since ${f.seconds(it.age_s)} (${it.request_id})`;
  return h("li", { class: `slot ${it.phase}`, "data-key": it.request_id, title },
    h("i", { class: "done", "aria-hidden": "true", style: { width: `${it.phase === "prefill" ? 100 * read : 100}%` } }),
    h("span", {}, h("b", {}, it.user || "somebody"), h("span", { class: "age" }, f.seconds(it.age_s))),
    h("span", {}, h("span", { class: "verb" }, verb), " ", detail));
}

function memory(it, host) {
  const share = (bytes) => (100 * bytes) / it.machine_bytes;
  const text = it.segments.map((part) => `${part.label} ${f.bytes(part.bytes)}`).join(", ");
  const groups = [["foreign", "other programs"], ["permanent", "model"], ["request", "conversations"],
    ["cached", "cached prompts"], ["headroom", "headroom"], ["free", "free"]];
  const sum = (kind) => it.segments.filter((part) => part.kind === kind).reduce((all, part) => all + part.bytes, 0);
  return h("div", { class: "memory" },
    h("div", { class: "head" }, h("h4", {}, `Memory, ${f.bytes(it.machine_bytes)}`,
      it.available_bytes != null && h("small", {}, ` ${f.bytes(it.available_bytes)} available now`)),
      it.guard_stage && it.guard_stage !== "calm" && h("span", { class: "pill busy", title: it.guard_last_event }, `guard: ${it.guard_stage}`)),
    h("div", { class: "stack", role: "img", "aria-label": `Memory of ${host}: ${text}` },
      it.segments.map((part) => h("i", { class: `part ${part.kind}`, "data-key": part.name,
        title: `${part.label}: ${f.bytes(part.bytes)}`, style: { width: `${share(part.bytes)}%` } }))),
    h("ul", { class: "legend" }, groups.filter(([kind]) => sum(kind) > 0).map(([kind, label]) =>
      h("li", {}, h("i", { class: `swatch part ${kind}` }), `${label} `, h("b", {}, f.bytes(sum(kind)))))));
}

// --- lists -------------------------------------------------------------------------------------------------------

export function queue({ waiting, now }) {
  if (!waiting.length) return [h("p", { class: "card empty" }, "Nobody waits.")];
  const rows = waiting.map((it) => h("tr", { "data-key": it.request_id },
    h("td", {}, it.user || "somebody"),
    h("td", {}, f.reason(it.waits_for), it.num_preemptions > 0 && h("small", {}, ` preempted ${it.num_preemptions}×`)),
    h("td", { class: "number" }, f.seconds(it.age_s)), h("td", { class: "number" }, f.count(it.num_tokens)),
    h("td", {}, it.host)));
  const more = now.waiting - waiting.length;
  return [table("Waiting requests", ["Who", "Waits for", "Since", "Tokens", "Mac"], rows, [2, 3]),
    more > 0 && h("p", { class: "note" }, `and ${f.count(more)} more`)];
}

export function charts(hour, cursors) {
  const minutes = hour.minutes;
  // The present minute is not over: its rate is that of the seconds that it has had, once those are a few.
  const length = (place) => (place < minutes.length - 1 ? 60 : hour.elapsed_in_last_s > 10 ? hour.elapsed_in_last_s : null);
  const pick = (name, q) => minutes.map((minute) => minute[name][q]);
  const both = (name) => [{ name: "95th percentile", kind: "second", values: pick(name, "p95") },
    { name: "median", kind: "first", values: pick(name, "p50") }];
  const specs = [
    { title: "Tokens a second", format: f.rate, area: true, lines: [{ name: "written", kind: "first",
      values: minutes.map((minute, place) => length(place) && minute.output_tokens / length(place)) }] },
    { title: "Time to first token", format: f.seconds, lines: both("ttft_s") },
    { title: "Time between tokens", format: f.seconds, lines: both("gap_s") },
    { title: "Wait before reading", format: f.seconds, lines: both("queue_s") },
  ];
  return specs.map((spec) => chart({ ...spec, cursor: cursors.get(spec.title) ?? null }));
}

const ROUTES = {
  cached: "has most of it cached", moved: "the cache is busy elsewhere", cold: "nothing cached, least busy",
  only: "the only one", last_resort: "nothing better left",
};

export function routing(list) {
  if (!list.length) return [h("p", { class: "empty" }, "No requests yet.")];
  return [h("ul", { class: "log" }, list.map((it) => h("li", { "data-key": it.request_id },
    h("time", {}, f.clock(it.at_unix_s)), h("b", {}, it.host), ` ${ROUTES[it.reason] ?? it.reason}`,
    h("small", {}, ` ${f.count(it.cached_tokens)} of ${f.count(it.prompt_tokens)} tokens cached, cost ${f.seconds(it.cost_s)}`
      + (it.next ? `; next best ${it.next.host}, ${f.seconds(it.next.cost_s)}` : "")))))];
}

export function scaling(list) {
  if (!list.length) return [h("p", { class: "empty" }, "The number is fixed, or has not changed yet.")];
  return [h("ul", { class: "log" }, list.map((it) => h("li", { "data-key": `${it.model} ${it.at_unix_s}` },
    h("time", {}, f.clock(it.at_unix_s)), h("b", {}, `${it.num_before} → ${it.num_after}`), ` ${it.model}`,
    h("small", {}, ` ${it.reason.replace(/^\d+ -> \d+: /, "")}`))))];
}

export function errors(list) {
  if (!list.length) return [h("p", { class: "empty" }, "None.")];
  return [h("ul", { class: "log" }, list.map((it) => h("li", { "data-key": it.request_id },
    h("time", {}, f.clock(it.at_unix_s)), h("b", {}, it.code), ` ${it.key_name || "somebody"}${it.host ? ` on ${it.host}` : ""}`,
    h("small", {}, ` ${it.sentence}`))))];
}

function table(caption, columns, rows, numeric) {
  return h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map((name, place) =>
      h("th", { scope: "col", class: numeric.includes(place) && "number" }, name)))),
    h("tbody", {}, rows)));
}
