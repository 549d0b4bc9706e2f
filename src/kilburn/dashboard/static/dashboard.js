// Keeps a page up to date, and names what the pointer or the keyboard is on. Everything works without it.
"use strict";

const main = document.getElementById("main");

function place(element) {
  return element && element !== document.body && main.contains(element) ? element.getAttribute("href") || element.id : null;
}

// A page that is renewed takes at most a twentieth of somebody's time, however often its session changes.
const SHARE = 20;

let fetching = false;
let again = false;

async function renew() {
  if (fetching) {
    again = true;
    return;
  }
  fetching = true;
  const began = performance.now();
  try {
    const reply = await fetch(location.href, { headers: { accept: "text/html" } });
    const fresh = new DOMParser().parseFromString(await reply.text(), "text/html").getElementById("main");
    const typing = document.activeElement && document.activeElement.matches("main input");
    if (fresh && !typing && String(getSelection()) === "" && fresh.innerHTML !== main.dataset.last) {
      const focused = place(document.activeElement);
      const open = [...main.querySelectorAll("details")].map((one) => one.open);
      main.dataset.last = fresh.innerHTML;
      main.replaceChildren(...fresh.childNodes);
      main.querySelectorAll("details").forEach((one, at) => (one.open = Boolean(open[at])));
      if (focused) {
        [...main.querySelectorAll("a,[id]")].find((one) => place(one) === focused)?.focus({ preventScroll: true });
      }
      strips();
    }
    if (main.querySelector("[data-again]")) setTimeout(renew, 700);
  } catch {
    // The dashboard has ended; the page stays as it is.
  } finally {
    setTimeout(next, SHARE * (performance.now() - began));
  }
}

function next() {
  fetching = false;
  if (again) {
    again = false;
    renew();
  }
}

function live() {
  const url = main.dataset.live;
  const said = document.getElementById("live");
  if (!url || !said) return;
  let source = null;
  const button = document.createElement("button");
  button.type = "button";
  function turn(on) {
    source?.close();
    source = on ? new EventSource(url) : null;
    if (source) source.onmessage = renew;
    button.textContent = on ? "live" : "paused";
    button.setAttribute("aria-pressed", String(on));
    button.setAttribute("aria-label", "Keep this page up to date");
  }
  button.addEventListener("click", () => turn(!source));
  document.addEventListener("visibilitychange", () => {
    if (!source) return;
    if (document.hidden) source.close();
    else {
      turn(true);
      renew();
    }
  });
  addEventListener("pagehide", () => source?.close());
  said.append(button);
  turn(true);
}

function strips() {
  for (const strip of main.querySelectorAll("[data-strip]")) {
    const readout = strip.closest("figure").querySelector("[data-readout]");
    const say = (target) => {
      const title = target.closest?.("a")?.querySelector("title") || target.querySelector?.("title");
      const words = title ? title.textContent : target.closest?.("a")?.getAttribute("aria-label");
      if (words) readout.textContent = words;
    };
    strip.addEventListener("pointerover", (event) => say(event.target));
    strip.addEventListener("focusin", (event) => say(event.target));
    strip.addEventListener("keydown", (event) => {
      const ticks = [...strip.querySelectorAll(".ruler a")];
      const at = ticks.indexOf(document.activeElement);
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (at >= 0 && step) {
        ticks[at + step]?.focus();
        event.preventDefault();
      }
      const rise = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (rise) {
        climb(strip, ticks, at, rise);
        event.preventDefault();
      }
    });
  }
}

// From a prompt up through its pages, and down again.
function climb(strip, ticks, at, rise) {
  const svg = strip.querySelector("svg");
  const wide = svg.viewBox.baseVal.width / ticks.length;
  if (at >= 0) strip.dataset.at = at;
  const x = (Number(strip.dataset.at || 0) + 0.5) * wide;
  const pages = [...strip.querySelectorAll(".blocks a")]
    .filter((one) => {
      const box = one.firstElementChild;
      return box.x.baseVal.value <= x && x < box.x.baseVal.value + box.width.baseVal.value;
    })
    .sort((one, other) => other.firstElementChild.y.baseVal.value - one.firstElementChild.y.baseVal.value);
  const now = at >= 0 ? -1 : pages.indexOf(document.activeElement);
  const next = now + rise;
  if (next < 0) ticks[Number(strip.dataset.at || 0)]?.focus();
  else pages[Math.min(next, pages.length - 1)]?.focus();
}

strips();
live();
// On a phone the tabs do not fit beside each other.
document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
if (main.querySelector("[data-again]")) setTimeout(renew, 700);
