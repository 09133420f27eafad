// Calls of this server with the tab's API key, and elements of the page.

export const $ = (id) => document.getElementById(id);
export const seen = { overview: null }; // the last overview of the cluster

const KEY = "pdcluster-api-key";
const SVG = "http://www.w3.org/2000/svg";
const KEY_CHARACTERS =
  "This is no key: a key has letters A to Z and a to z, digits and signs of ASCII, and no space.";
const ASKS = "This server asks for a key: that of pdctl up --api-key, or one that its operator gave you.";
const LIMIT = 10000;
let asking = null;

/**
 * Fetch; where a key is needed, ask for it and try again. Without a signal, for ten seconds.
 * began: takes the time at which each try begins.
 */
export async function call(path, { began, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const signal = options.signal ?? AbortSignal.timeout(LIMIT);
    began?.(performance.now());
    const response = await fetch(path, { ...options, headers, signal });
    if (response.status !== 401) return response;
    const message = key ? await messageOf(response) : ASKS;
    if (key === sessionStorage.getItem(KEY)) sessionStorage.removeItem(KEY);
    if (!sessionStorage.getItem(KEY)) await (asking ??= askForKey(message, Boolean(key)));
  }
}

/** The message of an answer that is no success. */
export async function messageOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

function askForKey(message, isWrong) {
  const dialog = $("login"), text = $("login-text");
  text.textContent = sentence(message);
  text.classList.toggle("wrong", isWrong);
  if (!seen.overview) $("health").textContent = "needs an API key";
  dialog.showModal();
  return new Promise((done) => {
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      const key = $("key").value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        text.textContent = KEY_CHARACTERS;
        text.classList.add("wrong");
        return dialog.showModal();
      }
      sessionStorage.setItem(KEY, key);
      $("key").value = "";
      asking = null;
      done();
    };
  });
}

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Whether a call got no answer. */
export const isUnanswered = (error) => error instanceof TypeError || error.name === "TimeoutError";

/** A pod's name without its cluster's. */
export function short(pod) {
  const prefix = `${seen.overview?.cluster}-`;
  return pod.startsWith(prefix) ? pod.slice(prefix.length) : pod;
}

export function amount(value, units = ["", "k", "M", "G"], base = 1000) {
  let unit = 0;
  for (; value >= base && unit < units.length - 1; unit++) value /= base;
  const whole = value >= 100 || Number.isInteger(value);
  return `${whole ? Math.round(value) : value.toPrecision(2)} ${units[unit]}`.trim();
}

export const bytes = (value) => amount(value, ["B", "kB", "MB", "GB", "TB"]);

export function milliseconds(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}
