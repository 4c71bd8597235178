// The page, put together.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, tell } from "./dom.js";
import { EngineView } from "./engine.js";
import { showError } from "./log.js";

const api = new Api();
const keyForm = byId("key-form");

async function listModels() {
  try {
    const models = await api.models();
    const options = models.map(({ id }) => new Option(id, id));
    byId("model").replaceChildren(...options);
    document.title = `${models[0].id} · jaxllm`;
    keyForm.hidden = true;
    byId("message").focus();
  } catch (error) {
    if (error.status !== 401) showError(error.message);
  }
}

api.addEventListener("unauthorized", () => {
  if (keyForm.hidden) byId("key").value = "";
  keyForm.hidden = false;
  tell(byId("key-error"), api.hasKey ? "The server does not know this key." : "");
});

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key").value;
  listModels();
});

// A narrow screen is for the conversation; the pictures are one tap away, also when it is turned.
const wide = matchMedia("(min-width: 60rem)");
const fold = () => (byId("engine").open = wide.matches);
wide.addEventListener("change", fold);
fold();

new Chat(api);
new EngineView(api);
listModels();
