// The conversation as it is seen.

import { appendText, byId, copyOf, number } from "./dom.js";
import { FencedText } from "./fences.js";
import { picture } from "./images.js";

const log = byId("log");
// How far from the end a reader may be who still wants to see what comes.
const NEAR_END_PX = 40;

export function clear() {
  log.replaceChildren(byId("greeting"));
  byId("greeting").hidden = false;
}

export function showSaid({ text, images }) {
  const element = copyOf("said");
  element.querySelector(".images").append(...images.map(picture));
  appendText(element.querySelector(".text"), text);
  return add(element);
}

export function showError(text) {
  const element = document.createElement("p");
  element.className = "error";
  element.role = "alert";
  element.textContent = text;
  return add(element);
}

function add(element) {
  byId("greeting").hidden = true;
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

// Who reads at the end goes on to see it; who has scrolled back is left there.
function stayAtEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// An answer under way. It is busy until its end, so that it is read out whole and not in pieces.
export class AnswerView {
  #element = add(copyOf("answer"));
  #content = new FencedText(this.#part(".content"));
  #calls = [];

  append(fresh) {
    stayAtEnd(() => this.#append(fresh));
  }

  end(answer, isStopped) {
    this.#element.ariaBusy = "false";
    stayAtEnd(() => {
      this.#content.end();
      this.#part("footer").textContent = summary(answer, isStopped);
    });
  }

  remove() {
    this.#element.remove();
  }

  #append(fresh) {
    if (fresh.reasoning) this.#part(".reasoning").hidden = false;
    appendText(this.#part(".reasoning .text"), fresh.reasoning);
    this.#content.append(fresh.content ?? "");
    for (const part of fresh.calls ?? []) {
      const call = (this.#calls[part.index ?? 0] ??= this.#addCall());
      appendText(call.querySelector("code"), part.function?.name);
      appendText(call.querySelector("pre"), part.function?.arguments);
    }
  }

  #part(selector) {
    return this.#element.querySelector(selector);
  }

  #addCall() {
    const call = copyOf("call");
    this.#part(".calls").append(call);
    return call;
  }
}

const ENDS = {
  length: "reached its longest length",
  abort: "ended by the server",
  tool_calls: "waits for the result of a call",
};

function summary(answer, isStopped) {
  const parts = [];
  if (isStopped) parts.push("stopped");
  else if (answer.finish in ENDS) parts.push(ENDS[answer.finish]);
  if (answer.usage) parts.push(`${answer.usage.completion_tokens} tokens`);
  if (answer.tokensPerSecond) parts.push(`${number(answer.tokensPerSecond)} per second`);
  if (answer.secondsToFirst !== null) {
    parts.push(`first after ${number(answer.secondsToFirst)} s`);
  }
  return parts.join(" · ");
}
