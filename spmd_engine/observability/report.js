"use strict";
// Curves as SVG: one range of steps for all charts, values under the cursor, and keys that do what the mouse does.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"], DASHES = ["", "6 3", "2 2", "8 2 2 2"];
const HEIGHT = 220, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 22;
const charts = JSON.parse(document.getElementById("data").textContent).charts;
const all = charts.flatMap(chart => chart.curves.flatMap(curve => [curve.x[0], curve.x[curve.x.length - 1]]));
const whole = [Math.min(...all), Math.max(...all)];
let range = whole.slice();

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(each => each * power >= rough) * power, found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

const words = value => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3)
  ? value.toExponential(2).replace("e+", "e") : String(+value.toPrecision(4));

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

class Chart {
  constructor(figure, chart) {
    this.chart = chart;
    this.svg = element("svg", { tabindex: 0, role: "img", "aria-label": chart.title + ". Arrow keys read values." });
    this.output = document.createElement("output");
    figure.insertBefore(this.svg, figure.querySelector(".summary"));
    figure.insertBefore(this.output, figure.querySelector(".summary"));
    this.svg.addEventListener("pointerdown", event => { this.from = this.step(event); this.svg.setPointerCapture(event.pointerId); });
    this.svg.addEventListener("pointermove", event => this.read(this.step(event)));
    this.svg.addEventListener("pointerup", event => {
      const to = this.step(event), from = this.from;
      this.from = undefined;
      if (from !== undefined && Math.abs(to - from) > (range[1] - range[0]) / 50) zoom(from, to); else this.draw();
    });
    this.svg.addEventListener("dblclick", () => zoom(...whole));
    this.svg.addEventListener("keydown", event => this.key(event));
  }

  step(event) {
    const box = this.svg.getBoundingClientRect(), part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return range[0] + Math.min(1, Math.max(0, part)) * (range[1] - range[0]);
  }

  key(event) {
    const curve = this.chart.curves[0], at = nearest(curve.x, this.at ?? range[0]), span = range[1] - range[0];
    const jump = event.shiftKey ? 10 : 1, here = this.at ?? (range[0] + range[1]) / 2;
    const last = curve.x.length - 1;
    const moves = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: nearest(curve.x, range[0]), End: nearest(curve.x, range[1]) };
    if (event.key in moves) this.read(curve.x[Math.min(last, Math.max(0, moves[event.key]))]);
    else if (event.key === "+" || event.key === "=") zoom(here - span / 4, here + span / 4);
    else if (event.key === "-") zoom(here - span, here + span);
    else if (event.key === "Escape") zoom(...whole);
    else return;
    event.preventDefault();
  }

  read(step) {
    this.at = step;
    this.draw();
    const values = this.chart.curves.map(curve => {
      const at = nearest(curve.x, step);
      return (this.chart.curves.length > 1 ? curve.name + " " : "") + words(curve.y[at]) + " at step " + curve.x[at];
    });
    this.output.textContent = values.join("; ");
  }

  draw() {
    const width = Math.max(200, this.svg.clientWidth || 460), svg = this.svg;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("height", HEIGHT);
    const visible = this.chart.curves.flatMap(curve => curve.y.filter((_, i) => curve.x[i] >= range[0] && curve.x[i] <= range[1]));
    let low = Math.min(...visible), high = Math.max(...visible);
    if (!visible.length) [low, high] = [0, 1];
    if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
    const x = step => LEFT + (step - range[0]) / (range[1] - range[0] || 1) * (width - LEFT - RIGHT);
    const y = value => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
    for (const value of ticks(low, high, 5)) {
      element("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }, svg);
      element("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, svg).textContent = words(value);
    }
    for (const value of ticks(range[0], range[1], 5)) {
      const number = value.toLocaleString("en"), fits = x(value) + 4 * number.length < width;  // half of it to the right
      element("text", { x: fits ? x(value) : width - 1, y: HEIGHT - 6, "text-anchor": fits ? "middle" : "end" }, svg).textContent = number;
    }
    const clip = `clip-${charts.indexOf(this.chart)}`, area = element("clipPath", { id: clip }, svg);
    element("rect", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height: HEIGHT }, area);
    for (const curve of this.chart.curves) {
      const line = (of, opacity) => element("path", {
        d: of.x.map((step, i) => (i ? "L" : "M") + x(step).toFixed(1) + " " + y(of.y[i]).toFixed(1)).join(""),
        fill: "none", stroke: COLOURS[curve.run % COLOURS.length], "stroke-width": 1.5, "stroke-opacity": opacity,
        "stroke-dasharray": DASHES[Math.floor(curve.run / COLOURS.length) % DASHES.length], "clip-path": `url(#${clip})` }, svg);
      line(curve, curve.smooth ? 0.35 : 1);
      if (curve.smooth) line(curve.smooth, 1);
      if (curve.x.length === 1) element("circle", { cx: x(curve.x[0]), cy: y(curve.y[0]), r: 3, fill: COLOURS[curve.run % COLOURS.length] }, svg);
    }
    if (this.chart.curves.length > 1) this.chart.curves.forEach((curve, i) => {
      const label = element("text", { x: width - RIGHT - 4, y: TOP + 12 + 14 * i, "text-anchor": "end" }, svg);
      label.textContent = curve.name;
      label.style.fill = COLOURS[curve.run % COLOURS.length];
    });
    if (this.at !== undefined && this.at >= range[0] && this.at <= range[1])
      element("line", { class: "cursor", x1: x(this.at), x2: x(this.at), y1: TOP, y2: HEIGHT - BOTTOM }, svg);
    if (this.from !== undefined && this.at !== undefined) {
      const [a, b] = [x(this.from), x(this.at)].sort((one, other) => one - other);
      element("rect", { class: "zoom", x: a, width: b - a, y: TOP, height: HEIGHT - TOP - BOTTOM }, svg);
    }
  }
}

const drawn = charts.map((chart, i) => new Chart(document.querySelector(`[data-chart="${i}"]`), chart));

function zoom(from, to) {
  const [low, high] = from < to ? [from, to] : [to, from];
  range = [Math.max(whole[0], low), Math.min(whole[1], high)];
  if (range[1] - range[0] < 1) range = whole.slice();
  drawn.forEach(each => each.draw());
}

const redraw = () => drawn.forEach(each => each.draw());
addEventListener("resize", redraw);
addEventListener("beforeprint", redraw);
redraw();
