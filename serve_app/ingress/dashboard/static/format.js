// Numbers as people read them. Unknown (null) is a dash.

const DASH = "–";

export function count(value) {
  if (value == null) return DASH;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)} k`;
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value == null) return DASH;
  return value >= 100 || value === 0 ? count(value) : value.toFixed(1);
}

export function seconds(value) {
  if (value == null) return DASH;
  if (value < 0.0005) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export function bytes(value) {
  if (value == null) return DASH;
  const gib = value / 2 ** 30;
  if (gib >= 1) return `${gib.toFixed(gib >= 10 ? 0 : 1)} GiB`;
  return `${Math.round(value / 2 ** 20)} MiB`;
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : DASH;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// How long a newcomer would wait, in words.
export function newcomer(value) {
  if (value == null) return "a newcomer’s wait is not known";
  return value < 0.05 ? "a newcomer would not wait" : `a newcomer would wait ${seconds(value)}`;
}

// What a request waits for, in words.
export function reason(name) {
  const words = {
    slots: "a slot",
    blocks: "KV memory",
    state: "state memory",
    headroom: "memory headroom",
    prefill_turn: "its turn",
  };
  return words[name] ?? name;
}
