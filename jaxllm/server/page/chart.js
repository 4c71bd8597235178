// A line or two over the last minutes, in a picture of 120 by 40.

const WIDTH = 120;
const HEIGHT = 40;
const PADDING = 2;
const FEWEST = 20; // values in a picture: the first ones are no speck at its edge
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #svg;
  #paths = [];

  constructor(svg, numLines) {
    this.#svg = svg;
    const area = this.#path("area");
    for (let i = 0; i < numLines; i++) this.#paths.push(this.#path(`line line-${i}`));
    this.#paths.unshift(area);
  }

  // Draw lines of values, the newest last; null is a gap. `top` is the value at the upper edge.
  draw(lines, top) {
    const [area, ...paths] = this.#paths;
    area.setAttribute("d", this.#outline(lines[0], top, true));
    paths.forEach((path, i) => path.setAttribute("d", this.#outline(lines[i], top, false)));
  }

  #outline(values, top, isArea) {
    const length = Math.max(values.length, FEWEST);
    const step = (WIDTH - PADDING) / (length - 1);
    const start = length - values.length;
    return runs(values).map((run) => {
      const points = run.map(([i, value]) => {
        const height = (HEIGHT - 2 * PADDING) * Math.min(value / top, 1);
        return [(start + i) * step, HEIGHT - PADDING - height];
      });
      // One value alone is level for as long as it took to come.
      if (points.length === 1) points.unshift([Math.max(points[0][0] - step, 0), points[0][1]]);
      const line = points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
      if (!isArea) return `M${line}`;
      return `M${points[0][0].toFixed(2)} ${HEIGHT}L${line}L${points.at(-1)[0].toFixed(2)} ${HEIGHT}Z`;
    }).join("");
  }

  #path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    path.setAttribute("vector-effect", "non-scaling-stroke");
    this.#svg.append(path);
    return path;
  }
}

// Stretches without a gap, as pairs of place and value.
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) found.push([]);
    found.at(-1).push([i, value]);
  });
  return found;
}

// The least round number (1, 2 or 5 times a power of ten) that no value exceeds.
export function roundTop(values, least) {
  const most = Math.max(least, ...values.filter((value) => value !== null));
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= most * (1 - 1e-9));
}
