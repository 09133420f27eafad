// Workers, KV on its way between them, and the last hour; read again every two seconds.
import { $, amount, bytes, call, html, messageOf, seen, short, svg } from "./api.js";

const PERIOD = 2000, LONGEST = 30000, WINDOW = 20000;
const samples = []; // of the last seconds, for rates
let moving = new Set(); // pods to or from which KV is on its way

async function follow() {
  for (let wait = PERIOD; ; ) {
    if (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
    try {
      const response = await call("debug/cluster");
      if (!response.ok) throw new Error(await messageOf(response));
      seen.overview = await response.json();
      draw(seen.overview);
      wait = PERIOD;
      $("trouble").hidden = true;
    } catch (error) {
      wait = Math.min(2 * wait, LONGEST);
      const what = error instanceof TypeError ? "The worker cannot be reached" : error.message;
      $("trouble").textContent = `${what}. Trying again in ${Math.round(wait / 1000)} s.`;
      $("trouble").hidden = false;
      say("health", "not reachable", "lost");
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

function say(id, text, state) {
  if ($(id).textContent !== text) $(id).textContent = text; // a screen reader reads changes alone
  if (state) $(id).dataset.state = state;
}

function draw(overview) {
  const { workers } = overview;
  const ready = workers.filter((worker) => worker.state === "ready").length;
  document.title = `${overview.cluster} · PDCluster`;
  say("title", overview.cluster);
  say("about", `${overview.model} · namespace ${overview.namespace} · revision ${overview.revision} · seen by ${short(overview.pod)}`);
  const words = `${ready} of ${workers.length} workers ready`;
  say("health", overview.problem ?? words, overview.problem || ready < workers.length ? "starting" : "ready");
  const before = samples.at(-1), now = counted(workers);
  samples.push(now);
  while (now.at - samples[0].at > WINDOW) samples.shift();
  drawFigures(workers, now);
  drawWorkers(workers, before);
  drawHour(overview.history);
}

/** Counters of decode workers together, and of each worker's KV. */
function counted(workers) {
  const sum = (name) => decoding(workers).reduce((total, worker) => total + (worker.figures?.[name] ?? 0), 0);
  return {
    at: performance.now(), remote: sum("remote_prefills"), local: sum("local_prefills"), bytes: sum("kv_bytes"),
    each: Object.fromEntries(workers.map((worker) => [worker.pod, worker.figures?.kv_bytes ?? 0])),
  };
}

const decoding = (workers) => workers.filter((worker) => ["decode", "mixed"].includes(worker.role));

function perSecond(name, now) {
  const first = samples[0];
  return now.at > first.at ? Math.max(0, now[name] - first[name]) / ((now.at - first.at) / 1000) : 0;
}

function drawFigures(workers, now) {
  const sum = (name) => workers.reduce((total, worker) => total + (worker.figures?.[name] ?? 0), 0);
  const prompts = now.remote + now.local, blocks = sum("total_blocks");
  const figures = [
    ["Running", sum("num_running")],
    ["Waiting", sum("num_waiting")],
    ["KV in use", blocks ? percent(sum("used_blocks"), blocks) : "–"],
  ];
  if (workers.some((worker) => worker.role === "prefill")) {
    figures.push(
      ["Prefilled remotely", prompts ? percent(now.remote, prompts) : "–"],
      ["Remote prefills", `${amount(60 * perSecond("remote", now))}/min`],
      ["KV moved", `${bytes(perSecond("bytes", now))}/s`],
    );
  }
  $("figures").replaceChildren(...figures.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, String(value)))));
}

const percent = (part, whole) => `${Math.round((100 * part) / whole)} %`;

function drawWorkers(workers, before) {
  const role = { prefill: "prefill", decode: "decode", mixed: "decode" };
  for (const place of ["prefill", "decode", "others"]) {
    $(place).replaceChildren(...workers.filter((worker) => (role[worker.role] ?? "others") === place).map(card));
  }
  const moves = (worker) => worker.figures?.num_transfers > 0 || (before && (worker.figures?.kv_bytes ?? 0) > (before.each[worker.pod] ?? Infinity));
  moving = new Set(workers.filter(moves).map((worker) => worker.pod));
  const transfers = decoding(workers).reduce((total, worker) => total + (worker.figures?.num_transfers ?? 0), 0);
  const now = samples.at(-1), fresh = before ? now.bytes - before.bytes : 0;
  const text = transfers ? `KV of ${transfers} ${transfers === 1 ? "request" : "requests"} is on its way to decode workers`
    : fresh > 0 ? `${bytes(fresh)} of KV went to decode workers just now` : "No KV is on its way from prefill to decode";
  say("moving", workers.some((worker) => worker.role === "prefill") ? text : "Mixed workers prefill and decode themselves: no KV moves");
  drawWires();
}

function card(worker) {
  const { figures } = worker, details = [worker.pool && `pool ${worker.pool}`, worker.role === "mixed" && "mixed", worker.device];
  const element = html("li", { class: "worker", "data-pod": worker.pod }, html("strong", { title: worker.pod }, short(worker.pod)),
    html("span", { class: "state", "data-state": worker.state }, worker.state),
    html("p", { class: "meta" }, worker.note || details.filter(Boolean).join(" · ")));
  if (!figures) return element;
  const used = percent(figures.used_blocks, figures.total_blocks || 1);
  const fill = html("i");
  fill.style.width = used.replace(" ", "");
  element.append(
    html("dl", {}, ...[["Running", figures.num_running], ["Waiting", figures.num_waiting], ["KV", used]].map(
      ([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, String(value))))),
    html("div", { class: "bar", "aria-hidden": "true" }, fill));
  return element;
}

/** A line from each prefill worker to the middle, and from there to each decode worker. */
function drawWires() {
  const area = $("wires").getBoundingClientRect(), half = area.width / 2;
  const ends = ["prefill", "decode"].flatMap((side) => [...$(side).children].map((element) => {
    const box = element.getBoundingClientRect();
    return { side, pod: element.dataset.pod, y: box.top + box.height / 2 - area.top };
  }));
  const middle = (Math.min(...ends.map((end) => end.y)) + Math.max(...ends.map((end) => end.y))) / 2;
  $("wires").replaceChildren(...ends.map(({ side, pod, y }) => svg("path", {
    class: moving.has(pod) ? "wire moving" : "wire",
    d: side === "prefill" ? `M0,${y} C${half / 2},${y} ${half / 2},${middle} ${half},${middle}`
      : `M${half},${middle} C${1.5 * half},${middle} ${1.5 * half},${y} ${area.width},${y}`,
  })));
}

function drawHour({ period_seconds: period, ready, remote, local }) {
  const roles = Object.keys(ready), minutes = Math.round((remote.length * period) / 60);
  const most = Math.max(1, ...Object.values(ready).flat());
  $("hour").classList.toggle("empty", !remote.length);
  say("since", remote.length ? `${minutes} min, as ${short(seen.overview.pod)} has seen it; counts begin again when it restarts`
    : `Counting has begun: the first figures come after ${period} s`);
  say("replicas-text", ["Ready workers", ...roles.map((role) => `${role} ${ready[role].at(-1)} (${Math.min(...ready[role])} to ${Math.max(...ready[role])})`)].join(" · "));
  const step = 1000 / Math.max(20, remote.length), x = (index) => 1000 - step * (remote.length - index); // ten minutes at least
  plot("replicas", roles.map((role) => svg("path", {
    class: `s-${{ prefill: "prefill", decode: "decode", mixed: "decode" }[role] ?? "other"}`,
    d: ready[role].map((count, index) => `${index ? "L" : "M"}${x(index)},${level(count, most)}H${x(index) + step}`).join(""),
  })));
  const sum = (counts) => counts.reduce((total, count) => total + count, 0), highest = Math.max(1, ...remote.map((count, index) => count + local[index]));
  say("prompts-text", `Prompts · ${sum(remote)} prefilled remotely · ${sum(local)} locally`);
  plot("prompts", remote.flatMap((count, index) => [[count, 0, "prefill"], [local[index], count, "decode"]].filter(([height]) => height).map(
    ([height, under, name]) => svg("rect", { class: `f-${name}`, x: x(index), width: step, y: level(height + under, highest), height: level(0, highest) - level(height, highest) }))));
}

const level = (count, most) => 98 - (90 * count) / most;

function plot(id, shapes) {
  $(id).setAttribute("viewBox", "0 0 1000 100");
  $(id).setAttribute("preserveAspectRatio", "none");
  $(id).replaceChildren(...shapes);
}

addEventListener("resize", () => seen.overview && drawWires());
follow();
