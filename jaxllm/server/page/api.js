// The server that this page came from. Every request brings the key, if there is one.

import { events } from "./stream.js";

const KEY = "jaxllm-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Says "unauthorized" when the server wants another key than it got, and "key" when it changes.
export class Api extends EventTarget {
  #key = stored();

  get hasKey() {
    return this.#key !== "";
  }

  // It is kept for this tab only, and forgotten with it.
  set key(key) {
    this.#key = key;
    try {
      sessionStorage.setItem(KEY, key);
    } catch {
      // A browser that keeps nothing: then it lasts until the page is left.
    }
    this.dispatchEvent(new Event("key"));
  }

  async models() {
    const answer = await this.#fetch("v1/models");
    return (await answer.json()).data;
  }

  async description() {
    return (await this.#fetch("openapi.json")).json();
  }

  async metrics(signal) {
    return (await this.#fetch("metrics", { signal })).text();
  }

  // The chunks of a streamed answer; aborting the signal ends the request on the server.
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        ...body, stream: true, stream_options: { include_usage: true },
      }),
      signal,
    });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
      yield chunk;
    }
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) this.dispatchEvent(new Event("unauthorized"));
    throw new ApiError(response.status, await message(response));
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

async function message(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}
