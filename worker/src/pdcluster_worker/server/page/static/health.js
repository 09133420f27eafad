// Whether the cluster has ready workers of each role that it once had.

const known = new Set(); // roles that had a ready worker, by the history or while the page was open
const MISSING = {
  prefill: "no prefill worker: prompts are prefilled locally",
  decode: "no decode worker: nothing answers",
};

export function remember({ ready }) {
  for (const [role, counts] of Object.entries(ready)) if (Math.max(...counts) > 0) known.add(role);
}

const has = (workers, role) => workers.some((worker) => worker.role === role);

/** Whether prompts are prefilled on workers of their own, also while none of them is there. */
export const isSplit = (workers) =>
  has(workers, "prefill") || (known.has("prefill") && !has(workers, "mixed"));

/** Roles without a ready worker that had one. */
function missing(ready) {
  if (has(ready, "mixed")) return [];
  const lost = [];
  if (isSplit(ready) && !has(ready, "prefill")) lost.push("prefill");
  if ((known.has("decode") || known.has("mixed")) && !has(ready, "decode")) lost.push("decode");
  return lost;
}

/** Text and state of the badge. */
export function healthOf({ problem, workers, conditions }) {
  const ready = workers.filter((worker) => worker.state === "ready"), lost = missing(ready);
  const isComplete = !problem && !lost.length && ready.length === workers.length;
  const asleep = conditions?.items.some(({ reason }) => reason === "ScaledToZero");
  let text = `${ready.length} of ${workers.length} workers ready`;
  if (lost.includes("decode") && asleep) text = "scaled to zero: a request starts workers";
  else if (lost.length) text = [...counted(ready), ...lost.map((role) => MISSING[role])].join(", ");
  return [problem ?? text, isComplete ? "ready" : "starting"];
}

function counted(ready) {
  return ["prefill", "decode"].filter((role) => has(ready, role)).map((role) => {
    const number = ready.filter((worker) => worker.role === role).length;
    return `${number} ${role} ${number === 1 ? "worker" : "workers"} ready`;
  });
}
