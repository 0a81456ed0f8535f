"use strict";
// Charts of lines, by uPlot.
const lines = (() => {
  const {colour, size} = base;
  const FONT = "12px system-ui, sans-serif";
  const drawn = new Map();

  /**
   * Draw lines of bytes into a box, in the place of what is there.
   *
   * Lines: {label, values, stroke, dash, width}. Options: label of x, text(index) of a place,
   * pick(index): called for a click.
   */
  function draw(box, x, given, {label, text = (i) => String(x[i]), pick, height = 220} = {}) {
    forget(box);
    const axis = {stroke: colour("--muted"), font: FONT, grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line"), width: 1, size: 4}};
    const options = {
      width: Math.max(200, box.clientWidth), height,
      scales: {x: {time: false}, y: {range: (_, low, high) => [0, (high || 1) * 1.06]}},
      cursor: {points: {size: 6}, drag: {dist: 6}},
      series: [
        {label, value: (_, v, __, i) => (v === null || v === undefined || i === null ? "\u2013" : text(i))},
        ...given.map((line) => ({label: line.label, stroke: colour(line.stroke), width: line.width ?? 1.5, dash: line.dash, points: {show: x.length <= 40, size: 5}, value: (_, v) => (v === null ? "\u2013" : size(v))})),
      ],
      axes: [
        {...axis, size: 30, values: (_, splits) => splits.map((v) => (Number.isInteger(v) ? String(v) : ""))},
        {...axis, size: 72, values: (_, splits) => splits.map((v) => (v === null ? "" : size(v)))},
      ],
    };
    const plot = new uPlot(options, [x, ...given.map((line) => line.values)], box);
    if (pick) {
      let from = null;
      plot.over.addEventListener("mousedown", (event) => { from = event.clientX; });
      plot.over.addEventListener("click", (event) => {
        if (from !== null && Math.abs(event.clientX - from) > 5) return;
        const at = plot.posToIdx(event.clientX - plot.over.getBoundingClientRect().left);
        pick(at);
      });
    }
    const watcher = new ResizeObserver(() => {
      const width = Math.max(200, box.clientWidth);
      if (width !== plot.width) plot.setSize({width, height});
    });
    watcher.observe(box);
    drawn.set(box, {plot, watcher});
    return plot;
  }

  function forget(box) {
    const old = drawn.get(box);
    if (old) { old.watcher.disconnect(); old.plot.destroy(); drawn.delete(box); }
    box.textContent = "";
  }

  return {draw, forget};
})();
