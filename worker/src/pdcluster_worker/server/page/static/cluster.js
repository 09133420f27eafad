// Workers, KV on its way between them, and the last hour; read again every two seconds.
import {
  $, amount, bytes, call, html, isUnanswered, messageOf, seen, sentence, short, svg,
} from "./api.js";
import { drawConditions } from "./conditions.js";
import { healthOf, isSplit, remember } from "./health.js";
import { redraw } from "./redraw.js";

const PERIOD = 2000, LONGEST = 30000, WINDOW = 20000;
let seenAt = null;
const timeOf = (date) => date.toTimeString().slice(0, 8);
const samples = []; // of the last seconds, for rates
let moving = new Set(); // pods to or from which KV is on its way
const COUNTERS = ["remote_prefills", "kv_bytes"];

async function follow() {
  for (let wait = PERIOD; ; ) {
    if (document.hidden) await shown();
    try {
      const response = await call("debug/cluster");
      if (!response.ok) throw new Error(await messageOf(response));
      seen.overview = await response.json();
      draw(seen.overview);
      // by the server's clock: that of a browser may be wrong
      const now = Date.parse(response.headers.get("date")) || Date.now();
      drawConditions(seen.overview.conditions, now);
      wait = PERIOD;
      seenAt = new Date();
      $("trouble").hidden = $("retry").hidden = true;
      delete document.body.dataset.stale;
    } catch (error) {
      const lost = isUnanswered(error);
      wait = lost ? Math.min(2 * wait, LONGEST) : 2 * PERIOD; // one that answers is soon ready
      const what = lost ? "The worker cannot be reached" : sentence(error.message);
      const old = seenAt ? `What is below is of ${timeOf(seenAt)}. ` : "";
      const next = timeOf(new Date(Date.now() + wait));
      say("trouble", `${what}.`); // an alert interrupts: what changes stands outside of it
      say("retry", `${old}Next try at ${next}.`);
      document.body.dataset.stale = "yes";
      $("trouble").hidden = $("retry").hidden = false;
      say("health", lost ? "not reachable" : "not ready", lost ? "lost" : "starting");
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

function shown() {
  return new Promise((done) =>
    document.addEventListener("visibilitychange", done, { once: true }));
}

function say(id, text, state) {
  if ($(id).textContent !== text) $(id).textContent = text; // a screen reader reads changes alone
  if (state) $(id).dataset.state = state;
}

function draw(overview) {
  const { workers } = overview;
  remember(overview.history);
  document.title = `${overview.cluster} · PDCluster`;
  say("title", overview.cluster);
  const { model, namespace, revision, pod } = overview;
  const about = [`Serves ${model}`, `namespace ${namespace}`, `revision ${revision}`, `reported by ${short(pod)}`];
  say("about", about.join(" · "));
  say("health", ...healthOf(overview));
  samples.push(counted(workers));
  while (samples.at(-1).at - samples[0].at > WINDOW) samples.shift(); // a hidden tab took none
  drawFigures(workers);
  drawWorkers(workers);
  drawHour(overview.history);
}

/** Counters of each worker that reports, and their growth since the sample before. */
function counted(workers) {
  const reporting = workers.filter(({ figures }) => figures?.total_blocks > 0);
  const counters = Object.fromEntries(reporting.map(({ pod, figures }) => [pod, figures]));
  const before = samples.at(-1)?.counters ?? {}, grown = {};
  for (const pod of Object.keys(counters).filter((pod) => pod in before)) {
    grown[pod] = Object.fromEntries(
      COUNTERS.map((name) => [name, growth(before[pod][name], counters[pod][name])]));
  }
  const decodes = decoding(reporting).map(({ pod }) => grown[pod] ?? {});
  const total = (name) => decodes.reduce((sum, each) => sum + (each[name] ?? 0), 0);
  const totals = Object.fromEntries(COUNTERS.map((name) => [name, total(name)]));
  return { at: performance.now(), counters, grown, totals };
}

/** A worker that starts again counts from 0. */
const growth = (before, now) => (now < before ? now : now - before);

const SIDES = { prefill: "prefill", decode: "decode", mixed: "decode" };
const decoding = (workers) => workers.filter((worker) => SIDES[worker.role] === "decode");

function sum(workers, name) {
  return workers.reduce((total, worker) => total + (worker.figures?.[name] ?? 0), 0);
}

/** Growth at decode workers together; of a page that just opened too little, not ten times as much. */
function perSecond(name) {
  const period = Math.max(WINDOW / 2, samples.at(-1).at - samples[0].at);
  const grown = samples.slice(1).reduce((sum, { totals }) => sum + totals[name], 0);
  return (1000 * grown) / period;
}

function drawFigures(workers) {
  const decodes = decoding(workers), remote = sum(decodes, "remote_prefills");
  const prompts = remote + sum(decodes, "local_prefills"), blocks = sum(workers, "total_blocks");
  const figures = [
    ["Running", sum(workers, "num_running")],
    ["Waiting", sum(workers, "num_waiting")],
    ["KV in use", blocks ? percent(sum(workers, "used_blocks"), blocks) : "–"],
  ];
  if (isSplit(workers)) {
    figures.push(
      ["Prefilled remotely", prompts ? percent(remote, prompts) : "–"],
      ["Remote prefills", `${amount(60 * perSecond("remote_prefills"))}/min`],
      ["KV moved", `${bytes(perSecond("kv_bytes"))}/s`],
    );
  }
  redraw($("figures"), figures.map(figure));
}

/** As "<1 %" what is little and not nothing. */
function percent(part, whole) {
  const rounded = Math.round((100 * part) / whole);
  return part > 0 && rounded === 0 ? "<1 %" : `${rounded} %`;
}

function figure([name, value]) {
  return html("div", {}, html("dt", {}, name), html("dd", {}, String(value)));
}

function drawWorkers(workers) {
  for (const place of ["prefill", "decode", "others"]) {
    const there = workers.filter((worker) => (SIDES[worker.role] ?? "others") === place);
    const isGone = !there.length && place !== "others" && isSplit(workers);
    redraw($(place), isGone ? [html("li", { class: "meta" }, "none")] : there.map(card));
  }
  moving = new Set(workers.filter(moves).map((worker) => worker.pod));
  say("moving", movingText(workers));
  drawWires();
}

function moves({ pod, figures }) {
  if (!figures) return false;
  return figures.num_transfers > 0 || samples.at(-1).grown[pod]?.kv_bytes > 0;
}

function movingText(workers) {
  if (!isSplit(workers)) {
    return "Mixed workers prefill and decode themselves: no KV moves";
  }
  const transfers = sum(decoding(workers), "num_transfers");
  if (transfers) {
    const requests = `${transfers} ${transfers === 1 ? "request" : "requests"}`;
    return `KV of ${requests} is on its way to decode workers`;
  }
  const fresh = samples.at(-1).totals.kv_bytes;
  return fresh > 0 ? `${bytes(fresh)} of KV went to decode workers just now`
    : "No KV is on its way from prefill to decode";
}

const MEANINGS = {
  starting: "It starts, and takes no requests yet",
  connecting: "It is registered, and no connection to it stands yet",
  lost: "It does not answer: the others take its work",
  stalled: "Its engine makes no progress: the others take its work",
  draining: "It ends what it has, and takes nothing new",
};

function card(worker) {
  const { figures, pod, pool, state } = worker;
  const note = worker.note || MEANINGS[state];
  const details = [pool && `pool ${pool}`, worker.role === "mixed" && "mixed", worker.device];
  const element = html("li", { class: "worker", "data-pod": pod },
    html("strong", { title: pod }, short(pod)),
    html("span", { class: "state", "data-state": state }, state),
    html("p", { class: "meta" }, details.filter(Boolean).join(" · ")),
    ...(note ? [html("p", { class: "meta" }, note)] : []));
  if (!figures) return element;
  const used = ({ used_blocks: used, total_blocks: total }) => percent(used, total || 1);
  const kept = [["KV", used(figures)]];
  for (const tier of figures.tiers) kept.push([`KV in ${tier.name}`, used(tier)]);
  const load = [["Running", figures.num_running], ["Waiting", figures.num_waiting], ...kept];
  element.append(html("dl", {}, ...load.map(figure)), ...kept.map(([, share]) => bar(share)));
  return element;
}

function bar(share) {
  const fill = html("i");
  fill.style.width = share.replace(/[< ]/g, "");
  return html("div", { class: "bar", "aria-hidden": "true" }, fill);
}

/** A line from each prefill worker to the middle, and from there to each decode worker. */
function drawWires() {
  const area = $("wires").getBoundingClientRect(), half = area.width / 2;
  const ends = ["prefill", "decode"].flatMap((side) => [...$(side).querySelectorAll(".worker")].map((element) => {
    const box = element.getBoundingClientRect();
    return { side, pod: element.dataset.pod, y: box.top + box.height / 2 - area.top };
  }));
  if (!ends.length) return $("wires").replaceChildren();
  const heights = ends.map((end) => end.y);
  const middle = (Math.min(...heights) + Math.max(...heights)) / 2;
  $("wires").replaceChildren(...ends.map(({ side, pod, y }) => svg("path", {
    class: moving.has(pod) ? "wire moving" : "wire",
    d: side === "prefill" ? `M0,${y} C${half / 2},${y} ${half / 2},${middle} ${half},${middle}`
      : `M${half},${middle} C${1.5 * half},${middle} ${1.5 * half},${y} ${area.width},${y}`,
  })));
}

function drawHour({ period_seconds: period, ready, remote, local }) {
  const minutes = Math.ceil((remote.length * period) / 60), pod = short(seen.overview.pod);
  say("since", `${minutes} min, as ${pod} has seen it; counts begin again when it restarts`);
  const shown = Math.max(20, remote.length); // ten minutes at least
  const step = 1000 / shown;
  const longest = Math.round((shown * period) / 60);
  say("hour-title", longest < 60 ? `Last ${longest} minutes` : "Last hour");
  say("from", `${longest} min ago`);
  const x = (index) => 1000 - step * (remote.length - index);
  drawReplicas(ready, x, step);
  drawPrompts(remote, local, x, step, period);
}

function drawReplicas(ready, x, step) {
  const range = (counts) => {
    const least = Math.min(...counts), most = Math.max(...counts);
    return counts.at(-1) + (least < most ? ` (${least} to ${most})` : "");
  };
  caption("replicas-text", "Ready workers", Object.entries(ready).map(([role, counts]) =>
    [SIDES[role] ?? "wait", `${role} ${range(counts)}`]));
  const most = Math.max(1, ...Object.values(ready).flat());
  plot("replicas", Object.entries(ready).map(([role, counts]) => svg("path", {
    class: `s-${SIDES[role] ?? "other"}`,
    d: counts.map((count, index) =>
      `${index ? "L" : "M"}${x(index)},${level(count, most)}H${x(index) + step}`).join(""),
  })), most);
}

function drawPrompts(remote, local, x, step, period) {
  const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
  caption("prompts-text", "Prompts", [
    ["prefill", `${total(remote)} prefilled remotely`], ["decode", `${total(local)} locally`]]);
  const most = Math.max(1, ...remote.map((count, index) => count + local[index]));
  const column = (index, name, count, under) => svg("rect", {
    class: `f-${name}`,
    x: x(index),
    width: step,
    y: level(count + under, most),
    height: level(0, most) - level(count, most),
  });
  plot("prompts", remote.flatMap((count, index) => [
    ...(count ? [column(index, "prefill", count, 0)] : []),
    ...(local[index] ? [column(index, "decode", local[index], count)] : []),
  ]), `${most} in ${period} s`);
}

/** A title and its legend.  parts: colour and text of each */
function caption(id, title, parts) {
  const text = [title, ...parts.map(([, part]) => part)].join(" · ");
  if ($(id).dataset.text === text) return;
  $(id).dataset.text = text;
  const legend = parts.map(([colour, part]) =>
    html("span", {}, " · ", html("i", { class: `f-${colour}` }), part));
  $(id).replaceChildren(title, ...legend);
}

const level = (count, most) => 98 - (90 * count) / most;

/** most: what the highest place stands for */
function plot(id, shapes, most) {
  $(id).parentElement.dataset.most = most;
  $(id).setAttribute("viewBox", "0 0 1000 100");
  $(id).setAttribute("preserveAspectRatio", "none");
  $(id).replaceChildren(...shapes);
}

addEventListener("resize", () => seen.overview && drawWires());
follow();
