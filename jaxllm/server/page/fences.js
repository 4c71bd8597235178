// The text of an answer as it comes, with fenced code in blocks of its own. Every character is
// shown as the model wrote it, the fences, too.

import { appendText } from "./dom.js";

const FENCE = /^ *```/;
const MAY_BECOME_FENCE = /^ *`{0,2}$/;

export class FencedText {
  #element;
  #block = null; // what the text goes into
  #held = ""; // the beginning of a line of which it is not known yet what it is; null after that
  #isCode = false;
  #isLastOfCode = false;

  constructor(element) {
    this.#element = element;
  }

  append(text) {
    for (const piece of text.split(/(?<=\n)/)) this.#take(piece);
  }

  // There is no more.
  end() {
    if (this.#held) this.#write(this.#held);
    this.#held = "";
  }

  // Part of a line, or the rest of it.
  #take(piece) {
    if (this.#held !== null) {
      piece = this.#held + piece;
      this.#held = piece;
      if (MAY_BECOME_FENCE.test(piece)) return;
      if (FENCE.test(piece)) this.#meetFence();
      this.#held = null;
    }
    this.#write(piece);
    if (piece.endsWith("\n")) this.#endLine();
  }

  #meetFence() {
    if (this.#isCode) {
      this.#isLastOfCode = true;
    } else {
      this.#isCode = true;
      this.#block = null;
    }
  }

  #endLine() {
    this.#held = "";
    if (!this.#isLastOfCode) return;
    this.#isCode = this.#isLastOfCode = false;
    this.#block = null;
  }

  #write(text) {
    if (this.#block === null) {
      this.#block = document.createElement(this.#isCode ? "code" : "span");
      this.#element.append(this.#block);
    }
    appendText(this.#block, text);
  }
}
