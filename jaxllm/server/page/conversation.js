// What was said and answered, as the messages that a request is made of.

export class Conversation {
  #turns = [];

  reset() {
    this.#turns = [];
  }

  messages(system, said) {
    const head = system ? [{ role: "system", content: system }] : [];
    return [...head, ...this.#turns.flat(), ...this.#reply(said)];
  }

  keep(said, answer) {
    this.#turns.push([...this.#reply(said), answer.message]);
  }

  // What is said after calls is their result: a call without one is no conversation.
  #reply(said) {
    const calls = this.#turns.at(-1)?.at(-1).tool_calls ?? [];
    const content = contentOf(said);
    if (!calls.length) return [{ role: "user", content }];
    return calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content }));
  }
}

function contentOf({ text, images }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// An answer as it comes.
export class Answer {
  content = "";
  reasoning = "";
  calls = [];
  finish = null;
  usage = null;
  #begun = performance.now();
  #first = null;
  #last = null;

  // Take a chunk in; returns what is new of it.
  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return {};
    this.finish = choice.finish_reason ?? this.finish;
    const delta = choice.delta;
    // Some servers have another name for it.
    const fresh = {
      content: delta.content ?? "",
      reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
      calls: delta.tool_calls ?? [],
    };
    this.content += fresh.content;
    this.reasoning += fresh.reasoning;
    fresh.calls.forEach((part) => this.#addCall(part));
    if (fresh.content || fresh.reasoning || fresh.calls.length) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    return fresh;
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  // As the next request tells it. Models are not shown what they reasoned before.
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  get secondsToFirst() {
    return this.#first === null ? null : (this.#first - this.#begun) / 1000;
  }

  // From the first token to the last; of what came all at once it cannot be said.
  get tokensPerSecond() {
    const seconds = (this.#last - this.#first) / 1000;
    return this.usage && seconds > 0.05 ? (this.usage.completion_tokens - 1) / seconds : null;
  }

  #addCall(part) {
    const call = (this.calls[part.index ?? 0] ??= {
      id: "", type: "function", function: { name: "", arguments: "" },
    });
    call.id ||= part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}
