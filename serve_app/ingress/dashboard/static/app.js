// Joins the page to the stream of pictures, and keeps it joined.

import { followCursors } from "./charts.js";
import { show } from "./dom.js";
import * as trial from "./trial.js";
import * as views from "./views.js";

const SILENCE_MS = 4000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8000;

const byId = (id) => document.getElementById(id);
const page = byId("page");
const pill = byId("connection");
const cursors = new Map();
let picture = null;
let silence = null;
let retryMs = FIRST_RETRY_MS;

function connect() {
  const source = new EventSource("/dashboard/events");
  source.onmessage = (message) => {
    retryMs = FIRST_RETRY_MS;
    picture = JSON.parse(message.data);
    say("live");
    draw();
    clearTimeout(silence);
    silence = setTimeout(() => say("reconnecting"), SILENCE_MS);
  };
  source.onerror = () => {
    // The server ends each stream after a while and the browser asks again by itself; a refusal it takes as final.
    if (source.readyState !== EventSource.CLOSED) return;
    say("reconnecting");
    setTimeout(signInOrConnect, retryMs);
    retryMs = Math.min(2 * retryMs, LAST_RETRY_MS);
  };
}

async function signInOrConnect() {
  try {
    const answer = await fetch("/v1/models");
    if (answer.status === 401) return location.reload();
  } catch {
    // Nobody is there: the stream will say so, too.
  }
  connect();
}

function say(state) {
  if (pill.dataset.state !== state) {
    pill.dataset.state = state;
    pill.textContent = state;
  }
  page.classList.toggle("stale", state === "reconnecting" && picture !== null);
}

function draw() {
  show(byId("summary"), views.summary(picture));
  show(byId("figures"), ...views.figures(picture));
  show(byId("mac-list"), ...views.macs(picture.macs));
  show(byId("queue-list"), ...views.queue(picture));
  drawCharts();
  show(byId("routing"), ...views.routing(picture.routing));
  show(byId("scaling"), ...views.scaling(picture.scaling));
  show(byId("error-list"), ...views.errors(picture.failures));
  trial.offerModels(picture.models);
  byId("sign-out").hidden = picture.key === null;
  byId("key-name").textContent = picture.key ?? "";
  page.removeAttribute("aria-busy");
}

function drawCharts() {
  if (picture) show(byId("charts"), ...views.charts(picture.hour, cursors));
}

followCursors(byId("charts"), cursors, drawCharts);
trial.start();
connect();
