// Live pictures of the engine. Nothing is asked while nobody can see them.

import { Chart, roundTop } from "./chart.js";
import { byId, copyOf, number, tell } from "./dom.js";
import { figures, parse } from "./metrics.js";

const EVERY_MS = 1000;
const LENGTH = 120; // most values in a picture: two minutes

// Each figure: its lines with what follows their values, and the upper edge: `top`, or a round number
// above all values that is `least` or more.
const FIGURES = [
  { name: "Requests", lines: { running: "running", waiting: "waiting" }, least: 5 },
  { name: "Tokens per second", lines: { generated: "out", prompt: "in" }, least: 10 },
  { name: "KV cache in use", lines: { kvUse: "%" }, least: 10 },
  { name: "Step time", lines: { stepMs: "ms" }, least: 1 },
  { name: "Prefix cache hits", lines: { hitRate: "%" }, top: 100 },
];

export class EngineView {
  #api;
  #history = [];
  #before = null;
  #charts;
  #watch = null; // the AbortController of what is going on while somebody looks

  constructor(api) {
    this.#api = api;
    this.#charts = FIGURES.map(addFigure);
    const panel = byId("engine");
    panel.addEventListener("toggle", () => this.#update());
    document.addEventListener("visibilitychange", () => this.#update());
    api.addEventListener("key", () => this.#restart());
    this.#update();
  }

  get #isSeen() {
    return byId("engine").open && !document.hidden;
  }

  #update() {
    if (!this.#isSeen) this.#pause();
    else if (this.#watch === null) this.#restart();
  }

  #restart() {
    this.#pause();
    if (!this.#isSeen) return;
    this.#watch = new AbortController();
    this.#poll(this.#watch.signal);
  }

  #pause() {
    this.#watch?.abort();
    this.#watch = null;
    this.#before = null; // rates are over one interval, not over a time in which nobody looked
  }

  // One page after the other, and never two at once: a busy engine may take its time to answer.
  async #poll(signal) {
    while (!signal.aborted) {
      try {
        const page = parse(await this.#api.metrics(signal));
        this.#take({ page, time: performance.now() });
        tell(byId("engine-error"), "");
      } catch (error) {
        if (signal.aborted) return;
        const wantsKey = error.status === 401;
        tell(byId("engine-error"), wantsKey ? "" : error.message);
        if (wantsKey) return; // until there is another one
      }
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  #take(now) {
    const fresh = figures(now, this.#before);
    this.#before = now;
    this.#history.push(fresh);
    this.#history.splice(0, this.#history.length - LENGTH);
    fresh.hitRate = hitRate(this.#history);
    FIGURES.forEach((figure, i) => show(figure, this.#charts[i], this.#history));
  }
}

// Over all that is in the picture: single requests would make it jump between 0 and 100.
function hitRate(history) {
  const total = (name) => history.reduce((sum, one) => sum + one[name], 0);
  return total("queries") ? (100 * total("hits")) / total("queries") : null;
}

function addFigure(figure) {
  const element = copyOf("figure");
  const names = Object.keys(figure.lines);
  element.querySelector(".name").textContent = figure.name;
  const values = names.map((_, i) => {
    const value = document.createElement("span");
    if (names.length > 1) value.className = `value-${i}`;
    return value;
  });
  element.querySelector("output").append(...values);
  byId("figures").append(element);
  const chart = new Chart(element.querySelector("svg"), names.length);
  return { element, values, chart };
}

function show(figure, { element, values, chart }, history) {
  const units = Object.entries(figure.lines);
  const lines = units.map(([name]) => history.map((one) => one[name]));
  const top = figure.top ?? roundTop(lines.flat(), figure.least);
  chart.draw(lines, top);
  element.querySelector(".top").textContent = number(top);
  const said = units.map(([name, unit]) => {
    const value = history.at(-1)[name];
    return value === null ? "–" : `${number(value)} ${unit}`;
  });
  values.forEach((value, i) => (value.textContent = said[i]));
  element.querySelector("svg").ariaLabel =
    `${figure.name}, up to two minutes back; now ${said.join(", ")}`;
}
