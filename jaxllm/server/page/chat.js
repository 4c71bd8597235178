// A conversation with the model: what is typed goes to the server, what comes back is shown.

import { Answer, Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { Images } from "./images.js";
import * as log from "./log.js";
import { InvalidSetting, readSettings } from "./settings.js";

const input = byId("message");

export class Chat {
  #api;
  #conversation = new Conversation();
  #images = new Images(log.showError);
  #running = null; // the AbortController of the answer under way

  constructor(api) {
    this.#api = api;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("reset").addEventListener("click", () => this.#reset());
    input.addEventListener("keydown", (event) => {
      // While a word is being composed, Enter ends the word.
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
  }

  #stop() {
    this.#running?.abort();
  }

  #reset() {
    this.#stop();
    this.#running = null; // what is still to come of it is not shown
    this.#conversation.reset();
    log.clear();
    this.#showState();
    input.focus();
  }

  async #send() {
    const text = input.value.trim();
    if (this.#running || !(text || this.#images.any)) return;
    let settings;
    try {
      settings = readSettings();
    } catch (error) {
      if (!(error instanceof InvalidSetting)) throw error;
      log.showError(error.message);
      return;
    }
    input.value = "";
    const running = new AbortController();
    this.#running = running;
    this.#showState();
    const said = { text, images: await this.#images.take() };
    if (this.#running !== running) return;
    if (!text && !said.images.length) {
      this.#running = null; // there was none that could be read
      this.#showState();
      return;
    }
    const shown = log.showSaid(said);
    const view = new log.AnswerView();
    const answer = new Answer();
    const failure = await this.#stream(settings, said, answer, view, running);
    if (this.#running !== running) return; // the conversation was reset meanwhile
    this.#running = null;
    this.#showState();
    const isStopped = running.signal.aborted;
    if (answer.isEmpty && (failure || isStopped)) {
      // As if it had not been said: it may be sent again.
      shown.remove();
      view.remove();
      input.value ||= text;
      this.#images.giveBack(said.images);
    } else {
      view.end(answer, isStopped);
      this.#conversation.keep(said, answer);
    }
    if (failure) log.showError(failure);
  }

  // Show an answer as it comes; returns what went wrong, if anything did.
  async #stream({ system, fields }, said, answer, view, running) {
    const messages = this.#conversation.messages(system, said);
    const body = { model: byId("model").value || undefined, messages, ...fields };
    try {
      for await (const chunk of this.#api.chat(body, running.signal)) {
        if (this.#running !== running) break;
        view.append(answer.add(chunk));
      }
    } catch (error) {
      if (!running.signal.aborted) return error.message;
    }
    return null;
  }

  #showState() {
    const isRunning = this.#running !== null;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    // A button that is gone would take the focus with it.
    if (hadFocus) input.focus();
  }
}
