"use strict";
// Charts of the page: lines by uPlot, histograms over time on a canvas.
const charts = (() => {
  const FONT = "12px system-ui, sans-serif";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Return a number for people: four digits, or a dash. JSON has NaN and infinities as text. */
  function format(value) {
    if (value === null || value === undefined) return "\u2013";
    if (typeof value === "string") return value;
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  }

  const plain = (values) => values.map((value) => (typeof value === "number" ? value : null));
  const positive = (values) => values.map((value) => (value > 0 ? value : null));

  /** Return whether lines of positive numbers need a logarithmic axis. */
  function spreads(lines) {
    const all = lines.flat().filter((value) => value !== null && value > 0);
    if (!all.length) return false;
    const [low, high] = all.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [all[0], all[0]]);
    return high / low > 30;
  }

  /** Return the marks of a logarithmic axis: powers of ten, and 2 and 5 times those if few. */
  function decades(_, axis, low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((last - first) / 7));
    const marks = [];
    for (let power = first; power <= last; power += every) {
      for (const times of last - first <= 2 ? [1, 2, 5] : [1]) marks.push(Number(`${times}e${power}`));
    }
    return marks.filter((mark) => mark >= low && mark <= high);
  }

  const drawn = new Map();

  /** Draw lines into a box, in the place of what is there. Lines: {label, values, stroke, ...}. */
  function lines(box, x, given, {log = false, bands = [], suffix = "", height = 200} = {}) {
    const data = [x, ...given.map((line) => (log ? positive(plain(line.values)) : plain(line.values)))];
    const few = x.length <= 40;
    const axis = {stroke: colour("--muted"), font: FONT, grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1, size: 4}};
    const options = {
      width: Math.max(200, box.clientWidth), height,
      scales: {x: {time: false}, y: log ? {distr: 3} : {}},
      cursor: {sync: {key: "page"}, points: {size: 6}},
      legend: {live: true},
      bands,
      series: [
        {label: "step", value: (_, v) => format(v)},
        ...given.map((line) => ({
          label: line.label, stroke: colour(line.stroke), width: line.width ?? 2, dash: line.dash,
          points: {show: few, size: 5}, value: (_, v) => (v === null || v === undefined ? "\u2013" : format(v) + suffix),
        })),
      ],
      axes: [
        {...axis, size: 30, values: (_, splits) => splits.map((v) => (Number.isInteger(v) ? String(v) : ""))},
        {...axis, size: 62, ...(log ? {splits: decades, filter: (_, splits) => splits} : {}), values: (_, splits) => splits.map((v) => (v === null ? "" : format(v) + suffix))},
      ],
    };
    forget(box);
    const plot = new uPlot(options, data, box);
    const watcher = new ResizeObserver(() => {
      const width = Math.max(200, box.clientWidth);
      if (width !== plot.width) plot.setSize({width, height});
    });
    watcher.observe(box);
    drawn.set(box, {plot, watcher});
  }

  function forget(box) {
    const old = drawn.get(box);
    if (old) { old.watcher.disconnect(); old.plot.destroy(); drawn.delete(box); }
    box.textContent = "";
  }

  /** Return a small line of numbers as SVG. */
  function spark(values) {
    const numbers = plain(values);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "spark");
    svg.setAttribute("viewBox", "0 0 100 20");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const there = numbers.filter((v) => v !== null);
    if (!there.length) return svg;
    const size = Math.max(1, Math.ceil(numbers.length / 150));
    const low = Math.min(...there), high = Math.max(...there);
    let part = [];
    const end = () => {
      if (part.length) {
        const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
        if (part.length === 1) part.push(part[0].replace(/^[^,]+/, (v) => Number(v) + 0.8));
        line.setAttribute("points", part.join(" "));
        svg.append(line);
      }
      part = [];
    };
    const put = (i) => {
      const x = numbers.length > 1 ? (100 * i) / (numbers.length - 1) : 50;
      const y = high > low ? 19 - (18 * (numbers[i] - low)) / (high - low) : 10;
      part.push(`${x.toFixed(1)},${y.toFixed(1)}`);
    };
    for (let i = 0; i < numbers.length; i += size) {
      // Of neighbours that share a place the lowest and the highest are drawn: no peak is lost.
      const own = [];
      for (let k = i; k < Math.min(i + size, numbers.length); k++) if (numbers[k] !== null) own.push(k);
      if (!own.length) { end(); continue; }
      const ordered = [...own].sort((a, b) => numbers[a] - numbers[b]);
      for (const k of [...new Set([ordered[0], ordered[ordered.length - 1]])].sort((a, b) => a - b)) put(k);
    }
    end();
    return svg;
  }

  let heat = null;

  /** Draw histograms over time: {x, edges, counts}; say in `out` what is under the pointer. */
  function heatMap(canvas, out, found) {
    heat = {canvas, out, found};
    paint();
  }

  function mix(low, high, share) {
    return low.map((v, i) => Math.round(v + (high[i] - v) * share));
  }

  function frame({canvas, found}) {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const box = {left: 66, top: 6, right: width - 8, bottom: height - 26};
    return {width, height, box, column: (box.right - box.left) / found.x.length,
      row: (box.bottom - box.top) / (found.edges.length - 1)};
  }

  function paint() {
    if (!heat) return;
    const {canvas, found} = heat;
    const {width, height, box, column, row} = frame(heat);
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const low = colour("--heat-low").split(" ").map(Number), high = colour("--heat-high").split(" ").map(Number);
    const most = found.counts.map((counts) => counts.reduce((a, b) => a + b, 0));
    pen.fillStyle = colour("--ground");
    pen.fillRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    found.counts.forEach((counts, i) => {
      counts.forEach((count, bin) => {
        if (!count) return;
        // From one value, or one in a hundred thousand, to a half of them.
        const range = Math.min(5, Math.max(1, Math.log10(most[i] / 2)));
        const share = Math.min(1, Math.max(0.08, 1 + Math.log10((2 * count) / most[i]) / range));
        pen.fillStyle = `rgb(${mix(low, high, share).join(",")})`;
        const top = box.bottom - (bin + 1) * row;
        pen.fillRect(box.left + i * column, top, Math.ceil(column * scale) / scale, Math.ceil(row * scale) / scale);
      });
    });
    writeAxes(pen, found, box, column, row);
  }

  function writeAxes(pen, found, box, column, row) {
    pen.font = FONT;
    pen.fillStyle = colour("--muted");
    pen.strokeStyle = colour("--line");
    pen.strokeRect(box.left + 0.5, box.top + 0.5, box.right - box.left - 1, box.bottom - box.top - 1);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const zero = found.edges.findIndex((edge) => edge > 0) - 1;
    const every = Math.max(1, Math.ceil(18 / row));
    for (let bin = 0; bin < found.edges.length - 1; bin++) {
      if ((bin - zero) % every) continue;
      const middle = box.bottom - (bin + 0.5) * row;
      const edge = bin < zero ? found.edges[bin + 1] : found.edges[bin];
      pen.fillText(bin === zero ? "about 0" : edge.toExponential(1), box.left - 6, middle);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (const [i, text] of marks(found.x, (box.right - box.left) / 70)) {
      pen.fillText(text, box.left + (i + 0.5) * column, box.bottom + 6);
    }
  }

  /** Return columns whose steps are round numbers, and their texts: at most about `most`. */
  function marks(x, most) {
    const range = Math.max(1, x[x.length - 1] - x[0]);
    const power = 10 ** Math.floor(Math.log10(range / most));
    const every = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((one) => range / one <= most) ?? 10 * power);
    const found = [];
    for (let at = Math.ceil(x[0] / every) * every; at <= x[x.length - 1]; at += every) {
      const i = x.findIndex((one) => one >= at);
      if (!found.length || found[found.length - 1][0] !== i) found.push([i, format(at)]);
    }
    return found;
  }

  function point(event) {
    if (!heat) return;
    const {found, out, canvas} = heat;
    const {box, column, row} = frame(heat);
    const place = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientX - place.left - box.left) / column);
    const bin = Math.floor((box.bottom - (event.clientY - place.top)) / row);
    if (!(i >= 0 && i < found.x.length && bin >= 0 && bin < found.edges.length - 1)) { out.textContent = ""; return; }
    const count = found.counts[i][bin], all = found.counts[i].reduce((a, b) => a + b, 0);
    const share = all ? ` (${format((100 * count) / all)} %)` : "";
    out.textContent = `Step ${format(found.x[i])}: ${count} of ${all} finite values${share} from ${found.edges[bin].toExponential(2)} to ${found.edges[bin + 1].toExponential(2)}`;
  }

  /** Begin to follow a canvas: pointer and size. */
  function follow(canvas) {
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerleave", () => { if (heat) heat.out.textContent = ""; });
    new ResizeObserver(paint).observe(canvas);
  }

  return {format, lines, forget, spark, heatMap, follow, spreads, plain};
})();
