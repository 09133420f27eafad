// The chat box.
import {
  $, amount, call, html, isUnanswered, messageOf, milliseconds, seen, sentence,
} from "./api.js";
import { showTrace } from "./trace.js";

let messages = [];
let running = null;

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
  // the button that had the focus is gone
  if (document.activeElement === document.body) $("message").focus();
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
  const chosen = $("place").value;
  const measured = { began: 0, first: 0, last: 0, tokens: 0, text: "" };
  let response = null, problem = "";
  try {
    response = await post((now) => (measured.began = now));
    if (!response.ok) throw new Error(await messageOf(response));
    await read(response, answer, measured);
  } catch (error) {
    const aborted = error.name === "AbortError";
    problem = isUnanswered(error) ? "the connection broke off" : error.message;
    if (aborted) problem = "Stopped";
  }
  answer.setAttribute("aria-busy", "false");
  if (measured.first || measured.tokens) keep(measured.text);
  else {
    messages.pop();
    if (problem && !$("message").value) $("message").value = text; // to be sent again
  }
  const place = response?.headers.get("x-pdcluster-prefill");
  conclude(answer, measured, place, problem);
  const id = response?.headers.get("x-request-id");
  if (response?.ok && id && problem !== "Stopped") {
    showTrace(id, place, chosen, response.headers.get("x-pdcluster-degraded"));
  }
}

const keep = (content) => messages.push({ role: "assistant", content });

/** With a query a relaying router answers itself, and so keeps the trace. */
function post(began) {
  return call("v1/chat/completions?by=page", {
    method: "POST",
    began,
    signal: running.signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model: seen.overview?.model ?? "",
      messages,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number($("most").value),
      temperature: Number($("temperature").value),
      pdcluster: { prefill: $("place").value },
    }),
  });
}

/** Below an answer, its figures and why it broke off. */
function conclude(answer, measured, place, problem) {
  const figures = describe(measured, place);
  if (figures) answer.append(html("span", { class: "measured" }, figures));
  const broke = measured.first && problem !== "Stopped" ? "The answer ended in an error: " : "";
  const failed = problem && sentence(broke + problem);
  if (failed) answer.append(html("span", { class: "error" }, failed));
  $("announcement").textContent = failed || `Answer complete. ${figures}`;
  $("log").scrollTop = $("log").scrollHeight;
}

/** Take the events of a stream; raises the error that one of them is, or that it has no end. */
async function read(response, answer, measured) {
  let rest = "", ended = false;
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const data of events.map(dataOf)) {
      if (data === "[DONE]") ended = true;
      else if (data) take(JSON.parse(data), answer, measured);
    }
  }
  if (!ended) throw new Error("the connection broke off");
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trim()).join("");
}

function take(chunk, answer, measured) {
  if (chunk.error) throw new Error(chunk.error.message);
  measured.tokens = chunk.usage?.completion_tokens ?? measured.tokens;
  measured.end = chunk.choices[0]?.finish_reason ?? measured.end;
  const { content, reasoning_content: reasoning } = chunk.choices[0]?.delta ?? {};
  if (!content && !reasoning) return;
  measured.last = performance.now();
  measured.first ||= measured.last;
  measured.text += content ?? "";
  if (reasoning) reasoningOf(answer).append(reasoning);
  if (content) answer.lastChild.data += content;
  $("log").scrollTop = $("log").scrollHeight;
}

function reasoningOf(answer) {
  const known = answer.querySelector("details > div");
  if (known) return known;
  const made = html("div");
  answer.prepend(html("details", { open: "" }, html("summary", {}, "Reasoning"), made));
  return made;
}

async function* pieces(stream) {
  const reader = stream.getReader();
  for (let next; !(next = await reader.read()).done; ) yield next.value;
}

function describe({ began, first, last, tokens, end }, place) {
  if (!first) return "";
  const parts = [`first token after ${milliseconds(first - began)}`];
  if (tokens > 1 && last > first) {
    parts.push(`${amount(((tokens - 1) * 1000) / (last - first))} tokens/s`);
  }
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (end === "length") parts.push("cut at Max tokens");
  if (place) parts.push(`prefill ${place}`);
  return parts.join(" · ");
}
