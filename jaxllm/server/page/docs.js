// The endpoints of the server, and the types of their bodies, from its own description.

import { Api } from "./api.js";
import { byId, tell } from "./dom.js";

const api = new Api();
const keyForm = byId("key-form");

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

const anchor = (name) => `type-${name}`;

// A type in words, in which the names of other types are links.
function typeOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    const link = element("a", name);
    link.href = `#${anchor(name)}`;
    return [link];
  }
  const kinds = schema.anyOf ?? schema.oneOf;
  if (kinds) return kinds.flatMap((kind, place) => [place ? " or " : "", ...typeOf(kind)]);
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.type === "array") return ["list of ", ...(schema.items ? typeOf(schema.items) : [])];
  return [[schema.type ?? "anything"].flat().join(" or ")];
}

// What else is said of a field: its bounds, its default, a description.
function remarks(schema) {
  const names = [
    "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "maxItems", "maxLength",
    "default",
  ];
  const said = names
    .filter((name) => schema[name] != null)
    .map((name) => `${name} ${JSON.stringify(schema[name])}`);
  return [schema.description, ...said].filter(Boolean).join(", ");
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const needed = schema.required?.includes(name) ? " (required)" : "";
    const type = element("td", ...typeOf(field), needed);
    return element("tr", element("td", element("code", name)), type, element("td", remarks(field)));
  });
  return element("table", ...rows);
}

function operation(path, method, { summary, parameters = [], requestBody, responses }) {
  const head = element("b", method.toUpperCase());
  const title = element("summary", head, element("code", path), " ", element("span", summary));
  const parts = parameters.map(({ name, in: place, schema, required }) =>
    element("p", element("code", name), ` in the ${place}: `, ...typeOf(schema),
      required ? " (required)" : ""));
  const bodies = [["Body", requestBody], ["Answer", responses["200"]]];
  for (const [name, body] of bodies) {
    for (const [kind, { schema }] of Object.entries(body?.content ?? {})) {
      parts.push(element("p", `${name}, ${kind}: `, ...typeOf(schema)));
    }
  }
  return element("details", title, ...parts);
}

function show({ paths, components }) {
  const operations = Object.entries(paths).flatMap(([path, item]) =>
    Object.entries(item).map(([method, one]) => operation(path, method, one)));
  byId("paths").replaceChildren(...operations);
  const types = Object.entries(components.schemas).map(([name, schema]) => {
    const title = element("summary", element("code", name), " ",
      element("span", schema.description ?? ""));
    const made = element("details", title, fields(schema));
    made.id = anchor(name);
    return made;
  });
  byId("schemas").replaceChildren(element("h2", "Types"), ...types);
  byId("schemas").hidden = false;
}

// A link leads to a type that is folded.
function open() {
  const found = byId(decodeURIComponent(location.hash.slice(1)));
  if (found instanceof HTMLDetailsElement) found.open = true;
}

async function load() {
  try {
    show(await api.description());
    keyForm.hidden = true;
    tell(byId("error"), "");
    open();
  } catch (error) {
    keyForm.hidden = error.status !== 401;
    tell(byId("error"), error.status === 401 && !api.hasKey ? "" : error.message);
  }
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key").value;
  load();
});
addEventListener("hashchange", open);
load();
