"use strict";
// Rows of blocks over time on a canvas: zoom, move, choose, also with keys.
const blocks = (() => {
  const {colour, element, button, time} = base;
  const ROW = 24, GAP = 6, TOP = 22, FONT = "11.5px system-ui, sans-serif";
  const charts = new Set();

  /**
   * Put a chart into a box.
   *
   * Rows: labels from the top. Blocks: {row, begin, length (us), fill: name of a colour, label},
   * sorted by begin. Options: end: the end of the axis, pick(place): called for a chosen block,
   * view: the end of what is shown at first, label: what the chart shows, for screen readers,
   * legend: names and their colours.
   */
  function chart(box, rows, given, {end, view, pick, label, legend = []}) {
    const side = rows.reduce((most, one) => Math.max(most, one.length), 4) * 6.4 + 14;
    const last = end || given.reduce((most, one) => Math.max(most, one.begin + one.length), 1);
    const state = {from: 0, to: Math.min(view ?? last, last), chosen: -1};
    const wrap = element("div", null, "blocks"), canvas = element("canvas"), tools = element("div", null, "tools");
    const height = TOP + rows.length * (ROW + GAP) + 4;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", `${label}. Arrow keys move, plus and minus zoom, n and p choose blocks.`);
    canvas.style.height = `${height}px`;
    tools.append(button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)), button("All", () => { state.from = 0; state.to = last; draw(); }), element("span", "", "muted"));
    wrap.append(canvas);
    const list = element("ul", null, "legend");
    for (const [name, fill] of legend) {
      const item = element("li"), mark = element("i");
      mark.style.background = `var(${fill})`;
      item.append(mark, name);
      list.append(item);
    }
    box.replaceChildren(tools, wrap, ...(legend.length ? [list] : []));
    const left = () => Math.min(side, canvas.clientWidth * 0.34);
    const scale = () => (canvas.clientWidth - left()) / (state.to - state.from);

    function draw() {
      const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
      if (!width) return;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      const pen = canvas.getContext("2d"), x0 = left(), k = scale();
      pen.scale(ratio, ratio);
      pen.font = FONT;
      pen.textBaseline = "middle";
      axis(pen, x0, width);
      const fills = {}, ink = colour("--card");
      pen.save();
      pen.beginPath();
      pen.rect(x0, 0, width - x0, height);
      pen.clip();
      const ends = new Float64Array(rows.length).fill(-1);
      given.forEach((one, place) => {
        if (one.begin > state.to || one.begin + one.length < state.from) return;
        const x = x0 + (one.begin - state.from) * k, long = Math.max(one.length * k, 0.7);
        // Blocks that share a pixel are drawn once.
        if (x + long < ends[one.row] && place !== state.chosen) return;
        ends[one.row] = x + long;
        const y = TOP + one.row * (ROW + GAP);
        pen.fillStyle = fills[one.fill] ??= colour(one.fill);
        pen.fillRect(x, y, Math.max(long - (long > 3 ? 1 : 0), 0.7), ROW);
        if (place === state.chosen) { pen.strokeStyle = colour("--text"); pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, Math.max(long - 2, 1), ROW - 2); }
        if (long > 16 && one.fill !== "--waiting") {
          pen.fillStyle = ink;
          const room = Math.floor((long - 6) / 6.3), name = one.label.length > room && one.short ? one.short : one.label;
          const text = name.length > room ? `${name.slice(0, Math.max(room - 1, 0))}\u2026` : name;
          if (room > 1) pen.fillText(text, Math.max(x, x0) + 4, y + ROW / 2);
        }
      });
      pen.restore();
      pen.fillStyle = colour("--text");
      rows.forEach((text, row) => {
        const room = Math.floor(x0 / 6.4), shown = text.length > room ? `${text.slice(0, room - 1)}\u2026` : text;
        pen.fillText(shown, 0, TOP + row * (ROW + GAP) + ROW / 2);
      });
      tools.lastChild.textContent = `${time(state.from / 1e6)} to ${time(state.to / 1e6)} of ${time(last / 1e6)}`;
    }

    function axis(pen, x0, width) {
      const span = state.to - state.from, count = Math.max(2, Math.floor((width - x0) / 110));
      const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
      const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) ?? raw;
      pen.strokeStyle = colour("--line");
      pen.fillStyle = colour("--muted");
      pen.lineWidth = 1;
      for (let at = Math.ceil(state.from / every) * every; at <= state.to; at += every) {
        const x = x0 + (at - state.from) * scale();
        pen.beginPath();
        pen.moveTo(x, TOP - 6);
        pen.lineTo(x, height);
        pen.stroke();
        const text = `${Number(at.toPrecision(6))} us`;
        if (x + 6.3 * text.length < width) pen.fillText(text, x + 2, 8);
      }
    }

    function zoom(by, around) {
      const middle = around ?? (state.from + state.to) / 2, span = Math.min(Math.max((state.to - state.from) * by, last / 1e5), last);
      const share = (middle - state.from) / (state.to - state.from);
      place(middle - share * span, span);
    }

    function place(from, span) {
      state.from = Math.max(0, Math.min(from, last - span));
      state.to = state.from + span;
      draw();
    }

    function choose(at) {
      if (at < 0 || at >= given.length) return;
      state.chosen = at;
      const one = given[at], span = state.to - state.from;
      if (one.begin + one.length < state.from || one.begin > state.to) place(one.begin - span / 4, span);
      else draw();
      pick(at);
    }

    function under(event) {
      const bounds = canvas.getBoundingClientRect();
      const x = event.clientX - bounds.left, y = event.clientY - bounds.top;
      const row = Math.floor((y - TOP) / (ROW + GAP)), at = state.from + (x - left()) / scale(), slack = 2 / scale();
      let best = -1;
      given.forEach((one, i) => { if (one.row === row && one.begin - slack <= at && at <= one.begin + one.length + slack && (best < 0 || one.length < given[best].length)) best = i; });
      return best;
    }

    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = {x: event.clientX, from: state.from, moved: false}; });
    canvas.addEventListener("pointermove", (event) => {
      if (!held || !event.buttons) return;
      const by = event.clientX - held.x;
      if (Math.abs(by) > 4) held.moved = true;
      if (held.moved) place(held.from - by / scale(), state.to - state.from);
    });
    canvas.addEventListener("click", (event) => { if (!held?.moved) choose(under(event)); held = null; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const x = event.clientX - canvas.getBoundingClientRect().left - left();
      zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, state.from + x / scale());
    }, {passive: false});
    canvas.addEventListener("keydown", (event) => {
      const span = state.to - state.from;
      const acts = {
        ArrowLeft: () => place(state.from - span / 8, span), ArrowRight: () => place(state.from + span / 8, span),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: () => place(0, span), End: () => place(last - span, span),
        n: () => choose(state.chosen + 1), p: () => choose(state.chosen - 1),
      };
      if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
    });
    new ResizeObserver(draw).observe(canvas);
    charts.add(draw);
    draw();
    return {draw};
  }

  /** Draw all charts again, in other colours. */
  const redraw = () => charts.forEach((draw) => draw());

  return {chart, redraw};
})();
