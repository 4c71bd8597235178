// What a request asks for beside its messages. A field that is left empty is not sent.

import { byId } from "./dom.js";

export class InvalidSetting extends Error {}

export function readSettings() {
  const form = byId("sampling");
  const fields = {};
  for (const input of form.querySelectorAll("input[name]")) {
    if (!input.checkValidity()) {
      // The browser can point at a field only where it is seen.
      byId("settings").open = true;
      input.reportValidity();
      throw new InvalidSetting(`${input.name}: ${input.validationMessage}`);
    }
    if (input.value) fields[input.name] = input.valueAsNumber;
  }
  const tools = byId("tools").value.trim();
  if (tools) fields.tools = parse(tools);
  return { system: byId("system").value.trim(), fields };
}

function parse(tools) {
  try {
    const value = JSON.parse(tools);
    if (Array.isArray(value)) return value;
  } catch {
    // Said below.
  }
  throw new InvalidSetting("tools: this is not a JSON list, such as OpenAI's API takes");
}
