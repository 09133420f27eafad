// The chat box, and where its last request ran.
import { $, amount, bytes, call, html, messageOf, seen, short, svg } from "./api.js";

const REASONS = {
  short: "the prompt is short", cached: "most of the prompt is in its cache", long: "the prompt is long",
  queue: "too many requests wait for prefill", decode_load: "many requests decode here", decode_busy: "its engine is busy",
  transfer: "moving the KV would take too long", slower: "a prefill worker would be slower", faster: "a prefill worker is faster",
  high_priority: "its priority is high", no_prefill_worker: "no prefill worker takes requests",
};
let messages = [], running = null;

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  running = new AbortController();
  $("stop").hidden = !($("send").disabled = $("clear").disabled = true);
  await ask(text);
  running = null;
  $("stop").hidden = !($("send").disabled = $("clear").disabled = false);
  if (document.activeElement === document.body) $("message").focus(); // the button that had it is gone
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  $("message").focus();
});

async function ask(text) {
  messages.push({ role: "user", content: text });
  const answer = html("article", { class: "assistant", "aria-busy": "true" }, "");
  $("log").append(html("article", { class: "user" }, text), answer);
  const measured = { began: performance.now(), first: 0, last: 0, tokens: 0, text: "" };
  let response = null, problem = "";
  try {
    // With a query a relaying router answers itself, and so keeps the trace.
    response = await call("v1/chat/completions?by=page", {
      method: "POST", signal: running.signal, headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: seen.overview?.model ?? "", messages, stream: true, stream_options: { include_usage: true },
        max_tokens: Number($("most").value), pdcluster: { prefill: $("place").value },
      }),
    });
    if (!response.ok) throw new Error(await messageOf(response));
    await read(response, answer.firstChild, measured);
  } catch (error) {
    problem = error.name === "AbortError" ? "Stopped" : error instanceof TypeError ? "The connection broke off" : error.message;
  }
  answer.setAttribute("aria-busy", "false");
  if (measured.text) messages.push({ role: "assistant", content: measured.text });
  else messages.pop();
  const place = response?.headers.get("x-pdcluster-prefill"), figures = describe(measured, place);
  if (figures) answer.append(html("span", { class: "measured" }, figures));
  if (problem) answer.append(html("span", { class: "error" }, measured.text && problem !== "Stopped" ? `The answer ended in an error: ${problem}` : problem));
  $("announcement").textContent = problem || `Answer complete. ${figures}`;
  $("log").scrollTop = $("log").scrollHeight;
  const id = response?.headers.get("x-request-id");
  if (response?.ok && id && problem !== "Stopped") showTrace(id, place, response.headers.get("x-pdcluster-degraded"));
}

/** Take the events of a stream; raises the error that one of them is, or that it has no end. */
async function read(response, node, measured) {
  let rest = "", ended = false;
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("");
      if (data === "[DONE]") ended = true;
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      measured.tokens = chunk.usage?.completion_tokens ?? measured.tokens;
      const { content, reasoning_content: reasoning } = chunk.choices[0]?.delta ?? {};
      if (!content && !reasoning) continue;
      measured.last = performance.now();
      measured.first ||= measured.last;
      measured.text += content ?? "";
      node.data += content ?? reasoning;
      $("log").scrollTop = $("log").scrollHeight;
    }
  }
  if (!ended) throw new Error("the connection broke off");
}

async function* pieces(stream) {
  const reader = stream.getReader();
  for (let next; !(next = await reader.read()).done; ) yield next.value;
}

function describe({ began, first, last, tokens }, place) {
  if (!first) return "";
  const parts = [`first token after ${milliseconds(first - began)}`];
  if (tokens > 1 && last > first) parts.push(`${amount(((tokens - 1) * 1000) / (last - first))} tokens/s`);
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (place) parts.push(`prefill ${place}`);
  return parts.join(" · ");
}

const milliseconds = (value) => (value >= 10000 ? `${(value / 1000).toFixed(1)} s` : value >= 10 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`);

async function showTrace(id, place, degraded) {
  $("request").hidden = false;
  for (let attempt = 0; attempt < 5; attempt++) {
    // It is kept once the request has ended; and another worker of this address may have answered.
    await new Promise((done) => setTimeout(done, 100 + 200 * attempt));
    const response = await call(`debug/requests/${id}`).catch(() => null);
    if (response?.ok) return drawTrace((await response.json()).journeys[0], degraded);
  }
  $("why").textContent = `Prefill ${place}; the worker that answered keeps the trace: pdctl why --request ${id}`;
  for (const part of ["timeline", "spans", "events"]) $(part).replaceChildren();
}

function drawTrace({ events, request_id: id }, degraded) {
  const here = seen.overview?.pod ?? "";
  const find = (name) => events.find((event) => event.name === name);
  const at = (name) => find(name)?.seconds ?? null;
  const named = find("decode_worker")?.facts.worker, decode = !named || named === "here" ? here : named;
  const place = find("context_end")?.facts.prefill ?? "local", peer = find("credit")?.facts.peer;
  const prefill = place === "remote" && peer ? peer : decode;
  const end = events.at(-1).seconds || 1e-6, moved = find("migration_end");
  const spans = [
    ["wait", "Wait", decode, 0, at("context_begin") ?? end],
    ["prefill", "Prefill", prefill, at("context_begin"), at("context_end")],
    ["kv", "KV", decode, moved && moved.seconds - moved.facts.seconds, moved?.seconds],
    ["decode", "Decode", decode, at("decoding_begin"), at("decoding_end") ?? end],
  ].filter(([, , , from, to]) => from != null && to != null && to >= from);
  const lanes = [...new Set([prefill, decode])];
  $("timeline").replaceChildren(...lanes.map((lane) => html("div", { class: "lane" }, html("span", { class: "meta" }, `${short(lane)}`),
    svg("svg", { class: "track", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `${short(lane)}: ${spans.filter((span) => span[2] === lane).map(inWords).join(", ")}` },
      ...spans.filter((span) => span[2] === lane).map(([kind, name, , from, to]) => svg("rect", {
        class: `f-${kind}`, x: (1000 * from) / end, width: Math.max(3, (1000 * (to - from)) / end), y: 0, height: 10 }, svg("title", {}, name)))))));
  $("spans").replaceChildren(...spans.map((span) => html("li", {}, html("i", { class: `f-${span[0]}` }),
    inWords(span) + (span[0] === "kv" ? `, ${bytes(moved.facts.bytes)}` : ""))));
  $("why").textContent = `${reason(find("offload"), place, prefill, decode)}${degraded ? ` Degraded: ${degraded}.` : ""} Request ${id}.`;
  $("events").replaceChildren(...events.map((event) => html("tr", {}, ...[(1000 * event.seconds).toFixed(1), event.name, short(event.worker || here),
    Object.entries(event.facts).map(([name, value]) => `${name} ${typeof value === "number" ? Number(value.toPrecision(4)) : value}`).join(", ")].map((text) => html("td", {}, text)))));
}

const inWords = ([, name, , from, to]) => `${name} ${milliseconds(1000 * (to - from))}`;

function reason(offload, place, prefill, decode) {
  const where = place === "remote" ? `Prefilled at ${short(prefill)}, decoded at ${short(decode)}` : `Prefilled and decoded at ${short(decode)}`;
  if (!offload) return `${where}, ${$("place").value === "auto" ? "without a choice" : "as you asked"}.`;
  const { reason: word, uncached_tokens: tokens, threshold } = offload.facts;
  return `${where}, since ${REASONS[word] ?? word} (${tokens} tokens to compute, threshold ${threshold}).`;
}
