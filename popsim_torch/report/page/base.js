"use strict";
// What all parts of the page use: decoding, figures as text, elements.
const base = (() => {
  const get = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function bytesOf(text) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return bytes.buffer;
  }
  const whole = (text) => new Int32Array(bytesOf(text));
  const numbers = (text) => new Float64Array(bytesOf(text));

  /** Return a number without the digits after the first ones, and without an exponent. */
  function rounded(value, digits) {
    if (!value || !Number.isFinite(value)) return value ? String(value) : "0";
    const near = Number(value.toPrecision(digits));
    const places = digits - 1 - Math.floor(Math.log10(Math.abs(near)));
    return near.toFixed(Math.max(places, 0));
  }

  function scaled(value, steps, digits, unit) {
    if (value === null || value === undefined) return "\u2013";
    const near = Math.max(Math.abs(value), Math.abs(Number(value.toPrecision(digits))));
    for (const [step, name] of steps) if (near >= step) return `${rounded(value / step, digits)} ${name}`;
    const text = Math.abs(value) < 1000 ? rounded(value, digits) : value.toFixed(0);
    return unit ? `${text} ${unit}` : text;
  }

  const STEPS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]];
  const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  /** Simulated cycles and times have two digits; one if their formula is assumed. */
  const digits = (grade) => (grade === "C" ? 1 : 2);
  const amount = (value, grade) => scaled(value, STEPS, digits(grade), "");
  const size = (value) => scaled(value, BYTES, 3, "B");
  const time = (value, grade) => scaled(value, SECONDS, digits(grade), "s");
  const percent = (value) => `${rounded(100 * value, Math.abs(value) < 0.1 ? 1 : 2)} %`;
  const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  function element(tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function button(text, act, kind) {
    const made = element("button", text, kind);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  }

  /** Put a name into an element, such that it may be broken after its parts. */
  function breakable(into, name) {
    for (const part of name.split(/(?<=[./_])(?![./_])/)) into.append(part, element("wbr"));
    return into;
  }

  function badge(grade) {
    const words = {A: "published formula", B: "fitted formula", C: "assumed formula", "": "no formula"};
    const made = element("span", grade || "none", `badge ${grade || "N"}`);
    made.title = words[grade] ?? grade;
    return made;
  }

  /** Return a bar of shares with a legend. Entries: [label, share, colour, text]. */
  function shareBar(entries, label) {
    const box = element("div"), bar = element("div", null, "share"), list = element("ul", null, "legend");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${label}: ${entries.map(([name, , , text]) => `${name} ${text}`).join(", ")}`);
    for (const [name, share, fill, text] of entries) {
      const piece = element("span");
      piece.style.cssText = `width: ${Math.max(0, 100 * share)}%; background: ${fill}`;
      bar.append(piece);
      const item = element("li"), mark = element("i");
      mark.style.background = fill;
      item.append(mark, `${name} ${text}`);
      list.append(item);
    }
    box.append(bar, list);
    return box;
  }

  /** Add the columns of ops, variables and blocks as arrays. */
  function decodeReport(report) {
    const decode = (columns, integers, floats) => {
      for (const name of integers) columns[name] = whole(columns[name]);
      for (const name of floats) columns[name] = numbers(columns[name]);
    };
    const estimate = report.estimate;
    for (const run of report.runs) decode(run, ["kind", "thread", "stage", "micro_batch"], ["begin", "length"]);
    if (!estimate) return report;
    const {ops, variables, blocks} = estimate;
    decode(ops, ["name", "kind", "module", "phase", "source", "formula", "grade", "plan", "stage", "ipu", "temporary_bytes", "recomputed", "inputs_count", "outputs_count", "inputs", "outputs"],
      ["executions", "cycles", "compute", "exchange", "sync", "glue", "flops"]);
    decode(variables, ["name", "class", "shape", "dtype", "ipu", "copies", "tiles", "first_op", "last_op"], ["bytes", "bytes_per_tile"]);
    decode(blocks, ["pid", "kind", "name", "stage"], ["begin", "length", "cycles"]);
    for (const ipu of estimate.ipus) {
      decode(ipu.memory, [], ["tiles", "always_tiles"]);
      decode(ipu.liveness, ["op"], ["worst", "mean"]);
    }
    for (const side of ["inputs", "outputs"]) {
      let at = 0;
      ops[`${side}_begin`] = ops[`${side}_count`].map((count) => { const begin = at; at += count; return begin; });
    }
    ops.text = (column, i) => report.texts[ops[column][i]];
    ops.side = (name, i) => Array.from(ops[name].subarray(ops[`${name}_begin`][i], ops[`${name}_begin`][i] + ops[`${name}_count`][i]));
    ops.total = (i) => ops.cycles[i] * ops.executions[i];
    variables.text = (column, i) => report.texts[variables[column][i]];
    blocks.text = (column, i) => report.texts[blocks[column][i]];
    return report;
  }

  return {get, colour, whole, numbers, rounded, amount, size, time, percent, plural, element, button, breakable, badge, shareBar, decodeReport};
})();
