// Conditions of the PDCluster, the worst first, as the operator wrote them.
import { $, html } from "./api.js";

let drawn = "";

/** conditions: null where no operator has written any.  now: of the server, in ms. */
export function drawConditions(conditions, now) {
  $("object").hidden = !conditions;
  if (!conditions) return;
  const { written, items } = conditions;
  const text = JSON.stringify(items);
  if (text !== drawn) {
    drawn = text;
    const fine = items.filter(isFine), others = items.filter((each) => !isFine(each));
    $("not-fine").replaceChildren(...others.map(condition));
    $("fine").replaceChildren(...fine.map(condition));
    $("fine-too").hidden = !fine.length;
    $("fine-text").textContent = `${others.length ? "Others" : "All"} are fine: ${fine.length}`;
  }
  const ago = age(written, now);
  $("written").textContent = `As the operator wrote them ${ago} ago, when one had changed last`;
  for (const time of $("object").querySelectorAll("time")) {
    time.textContent = `for ${age(time.dateTime, now)}`;
  }
}

const isFine = ({ severity }) => severity === "fine";

function condition({ type, status, reason, message, since, severity }) {
  return html("li", { class: "condition" },
    html("span", { class: "state", "data-severity": severity }, severity), " ",
    html("strong", {}, `${type} ${status}`), ` ${reason} `,
    html("time", { class: "meta", datetime: since }),
    html("p", {}, message));
}

function age(since, now) {
  const seconds = Math.max(0, (now - Date.parse(since)) / 1000);
  if (Number.isNaN(seconds)) return "an unknown time";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) ??
    [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}
