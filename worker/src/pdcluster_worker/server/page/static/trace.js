// Where the last request of the chat box ran.
import { $, bytes, call, html, milliseconds, seen, short, svg } from "./api.js";

const REASONS = {
  short: "the prompt is short",
  cached: "most of the prompt is in its cache",
  long: "the prompt is long",
  queue: "too many requests wait for prefill",
  decode_load: "many requests decode here",
  decode_busy: "its engine is busy",
  transfer: "moving the KV would take too long",
  slower: "a prefill worker would be slower",
  faster: "a prefill worker is faster",
  high_priority: "its priority is high",
  no_prefill_worker: "no prefill worker takes requests",
};

let newest = ""; // request that is shown, or will be

/** chosen: what Prefill was set to when it was sent */
export async function showTrace(id, place, chosen, degraded) {
  newest = id;
  $("request").hidden = false;
  $("why").textContent = "Its worker is asked for its timeline";
  for (const part of ["timeline", "spans", "events"]) $(part).replaceChildren();
  $("events-too").hidden = true;
  let response = null;
  for (let attempt = 0; attempt < 5; attempt++) {
    // It is kept once the request has ended; and another worker of this address may have answered.
    await new Promise((done) => setTimeout(done, 100 + 200 * attempt));
    response = await call(`debug/requests/${id}`).catch(() => null);
    const [journey] = response?.ok ? (await response.json()).journeys : [];
    if (newest !== id) return;
    if (journey) return draw(journey, chosen, degraded);
  }
  const lost = response ? `the worker that answered keeps it: pdctl why --request ${id}`
    : "the worker cannot be reached";
  $("why").textContent = `Prefill: ${place}. There is no timeline here; ${lost}.`;
}

function draw({ events, request_id: id }, chosen, degraded) {
  const workers = workersOf(events);
  const spans = spansOf(events, workers);
  const end = events.at(-1).seconds || 1e-6;
  const lanes = [...new Set([workers.prefill, workers.decode])];
  const drawn = lanes.map((pod) => lane(pod, spans.filter((span) => span.pod === pod), end));
  $("timeline").replaceChildren(...drawn);
  $("spans").replaceChildren(...spans.map(
    (span) => html("li", {}, html("i", { class: `f-${span.kind}` }), inWords(span) + span.note)));
  const why = reason(find(events, "offload"), chosen, workers);
  $("why").textContent = `${why}${degraded ? ` Degraded: ${degraded}.` : ""} Request ${id}.`;
  $("events").replaceChildren(...events.map(row));
  $("events-too").hidden = false;
}

const find = (events, name) => events.find((event) => event.name === name);
const here = () => seen.overview?.pod ?? "";

/** Pods that prefilled and decoded, and the place of the prefill. */
function workersOf(events) {
  const named = find(events, "decode_worker")?.facts.worker;
  const decode = !named || named === "here" ? here() : named;
  const place = find(events, "context_end")?.facts.prefill ?? "local";
  const peer = find(events, "credit")?.facts.peer;
  return { place, decode, prefill: place === "remote" && peer ? peer : decode };
}

function spansOf(events, { prefill, decode }) {
  const at = (name) => find(events, name)?.seconds;
  const end = events.at(-1).seconds || 1e-6, moved = find(events, "migration_end");
  const spans = [
    ["wait", "Queued", decode, 0, at("context_begin") ?? end],
    ["prefill", "Prefill", prefill, at("context_begin"), at("context_end")],
    ["kv", "KV", decode, moved && moved.seconds - moved.facts.seconds, moved?.seconds],
    ["decode", "Decode", decode, at("decoding_begin"), at("decoding_end") ?? end],
  ].map(([kind, name, pod, from, to]) => {
    const note = kind === "kv" && moved ? `, ${bytes(moved.facts.bytes)}` : "";
    return { kind, name, pod, from, to, note };
  });
  return spans.filter(({ from, to }) => from != null && to != null && to >= from);
}

/** One worker's part of the timeline. */
function lane(pod, spans, end) {
  const bars = spans.map(({ kind, name, from, to }) => svg("rect", {
    class: `f-${kind}`,
    x: (1000 * from) / end,
    width: Math.max(6, (1000 * (to - from)) / end),
    y: 0,
    height: 10,
  }, svg("title", {}, name)));
  const track = svg("svg", {
    class: "track",
    viewBox: "0 0 1000 10",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `${short(pod)}: ${spans.map(inWords).join(", ")}`,
  }, ...bars);
  return html("div", { class: "lane" }, html("span", { class: "meta" }, short(pod)), track);
}

const inWords = ({ name, from, to }) => `${name} ${milliseconds(1000 * (to - from))}`;

function row({ seconds, name, worker, facts }) {
  const shown = (value) => (typeof value === "number" ? Number(value.toPrecision(4)) : value);
  const by = Object.entries(facts).map(([fact, value]) => `${fact} ${shown(value)}`).join(", ");
  const cells = [(1000 * seconds).toFixed(1), name, short(worker || here()), by];
  return html("tr", {}, ...cells.map((text) => html("td", {}, text)));
}

function reason(offload, chosen, { place, prefill, decode }) {
  const where = place === "remote" ? `Prefilled at ${short(prefill)}, decoded at ${short(decode)}`
    : `Prefilled and decoded at ${short(decode)}`;
  if (!offload) {
    return `${where}, ${chosen === "auto" ? "without a choice" : `since Prefill is set to ${chosen}`}.`;
  }
  const { reason: word, uncached_tokens: tokens, threshold } = offload.facts;
  const compared = `${tokens} tokens to compute, threshold ${threshold}`;
  return `${where}, since ${REASONS[word] ?? word} (${compared}).`;
}
