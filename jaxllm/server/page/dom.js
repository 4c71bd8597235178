// Elements of the page. Text goes into them as text, whatever it looks like.

export const byId = (id) => document.getElementById(id);

// The element of a <template>, once more.
export const copyOf = (id) => byId(id).content.firstElementChild.cloneNode(true);

// Append to the text of an element without making it anew: an answer comes in many pieces.
export function appendText(element, text) {
  if (text) (element.lastChild ?? element.appendChild(new Text())).appendData(text);
}

// Show a text, or nothing if there is none.
export function tell(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const number = (value) => significant.format(value);
