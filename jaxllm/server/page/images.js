// Images that go with the next message: pasted, dropped or chosen, and shown before they are sent.

import { byId } from "./dom.js";

const list = byId("images");
const input = byId("image-files");

export class Images {
  #urls = []; // of data, so that nothing else is needed to send them
  #numReading = 0; // files that are still being read
  #read = Promise.resolve(); // when they are

  constructor(showError) {
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.#add([...input.files], showError); // the list itself is emptied here
      input.value = ""; // the same file may be chosen again
    });
    byId("message").addEventListener("paste", (event) => {
      const files = imagesOf(event.clipboardData.files);
      if (!files.length) return;
      event.preventDefault();
      this.#add(files, showError);
    });
    const main = document.querySelector("main");
    main.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    main.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault(); // or the browser leaves the page for the file
      this.#add([...event.dataTransfer.files], showError);
    });
  }

  get any() {
    return this.#urls.length + this.#numReading > 0;
  }

  // The images, once all are read. They are no longer here then.
  async take() {
    await this.#read;
    const urls = this.#urls;
    this.#urls = [];
    list.replaceChildren();
    return urls;
  }

  // Images that could not be sent come back, before what has been added since.
  giveBack(urls) {
    const added = this.#urls;
    this.#urls = [];
    list.replaceChildren();
    [...urls, ...added].forEach((url) => this.#show(url));
  }

  // One file is read after another, so that they stay in their order.
  #add(files, showError) {
    this.#numReading += files.length;
    this.#read = this.#read.then(() => this.#readAll(files, showError));
  }

  async #readAll(files, showError) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) {
        showError(`${file.name} is no image.`);
        continue;
      }
      try {
        this.#show(await dataUrl(file));
      } catch {
        showError(`${file.name} cannot be read.`);
      }
    }
    this.#numReading -= files.length;
  }

  #show(url) {
    this.#urls.push(url);
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Remove this image";
    button.append(picture(url));
    button.addEventListener("click", () => {
      this.#urls.splice([...list.children].indexOf(button), 1);
      button.remove();
      byId("message").focus();
    });
    list.append(button);
  }
}

export function picture(url) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = "An image";
  return image;
}

const imagesOf = (files) => [...files].filter((file) => file.type.startsWith("image/"));

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
