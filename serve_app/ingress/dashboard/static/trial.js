// The try-it box: asks, shows the answer as it comes, then where the time went.

import { h, show } from "./dom.js";
import * as f from "./format.js";

const answer = document.getElementById("trial-answer");
const timeline = document.getElementById("trial-timeline");
const stop = document.getElementById("trial-stop");
const models = document.getElementById("trial-model");
let running = null;

export function offerModels(names) {
  const known = [...models.options].map((option) => option.value);
  if (names.join() !== known.join()) models.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
}

export function start() {
  document.getElementById("trial").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  stop.addEventListener("click", () => running?.abort());
}

async function ask() {
  running?.abort();
  const control = (running = new AbortController());
  answer.replaceChildren();
  answer.dataset.state = "asking";
  show(timeline);
  stop.disabled = false;
  try {
    const response = await fetch("/dashboard/try", {
      method: "POST", headers: { "content-type": "application/json" }, signal: control.signal,
      body: JSON.stringify({
        model: models.value, stream: true, max_tokens: Number(document.getElementById("trial-tokens").value),
        messages: [{ role: "user", content: document.getElementById("trial-text").value }],
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await read(response);
  } catch (error) {
    if (error.name !== "AbortError") show(timeline, h("p", { class: "error", role: "alert" }, error.message));
  } finally {
    if (running === control) {
      stop.disabled = true;
      answer.dataset.state = "";
    }
  }
}

async function read(response) {
  const route = response.headers.get("x-route");
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.thinking) append(event.thinking, "thinking");
    if (event.text) append(event.text, "text");
    if (event.timings) show(timeline, ...told(event, route));
  }
}

// The values of a stream of server-sent events; "[DONE]" ends it.
async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}

function append(text, kind) {
  const last = answer.lastElementChild;
  if (last?.className === kind) last.append(text);
  else answer.append(h("span", { class: kind }, text));
}

function told({ timings, usage, finish_reason: why, id }, route) {
  const started = timings.prefill_started_s ?? timings.queued_s ?? 0;
  const first = timings.first_token_s ?? timings.total_s;
  const parts = [["queue", "waited", started], ["prefill", "read", first - started], ["decode", "wrote", timings.total_s - first]];
  const waits = Object.entries(timings.waited_s).filter(([, seconds]) => seconds >= 0.0005)
    .map(([name, seconds]) => `${f.seconds(seconds)} for ${f.reason(name)}`).join(", ");
  const pace = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / Math.max(1e-3, timings.total_s - first) : null;
  return [
    h("div", { class: "stack timeline", role: "img", "aria-label": `${f.seconds(timings.total_s)} in all` },
      parts.map(([kind, , seconds]) => h("i", { class: `part ${kind}`, style: { width: `${(100 * seconds) / timings.total_s}%` } }))),
    h("ul", { class: "legend" },
      h("li", {}, h("i", { class: "swatch part queue" }), "waited ", h("b", {}, f.seconds(started)), waits && ` (${waits})`),
      h("li", {}, h("i", { class: "swatch part prefill" }), `read ${f.count(usage.prompt_tokens)} tokens, `
        + `${f.count(usage.prompt_tokens_details.cached_tokens)} cached, in `, h("b", {}, f.seconds(first - started))),
      h("li", {}, h("i", { class: "swatch part decode" }), `wrote ${f.count(usage.completion_tokens)} tokens in `,
        h("b", {}, f.seconds(timings.total_s - first)), pace && ` (${f.rate(pace)} a second)`)),
    h("p", { class: "note" }, `Ended by ${why === "length" ? "its longest length" : "itself"} after ${f.seconds(timings.total_s)}. `,
      route && `Sent by: ${route}. `, h("code", {}, id)),
  ];
}
