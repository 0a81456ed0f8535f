"use strict";
// Memory: by tile, by class, by IPU, variables, and liveness.
const memory = (() => {
  const {get, element, size, percent, amount, shareBar, plural} = base;
  const CLASSES = {parameters: "--forward", state: "--update", accumulators: "--s2", stash: "--copies", activations: "--a", temporaries: "--b", code: "--s4", streams: "--host"};
  let report = null, ipu = null, plot = null, at = 0;

  function draw(given) {
    report = given;
    const {ipus} = report.estimate;
    if (!ipus.length || !ipus.some((one) => one.memory.tiles.length)) return;
    get("memory").hidden = false;
    get("liveness").hidden = !ipus.some((one) => one.liveness.op.length);
    const choice = get("memory-ipu");
    choice.replaceChildren(...ipus.map((one, i) => new Option(`${one.ipu}`, i)));
    choice.addEventListener("change", () => show(ipus[choice.value]));
    byIpu(ipus, choice);
    variables();
    const fullest = ipus.reduce((most, one, i) => (one.memory.peak > ipus[most].memory.peak ? i : most), 0);
    choice.value = fullest;
    show(ipus[fullest]);
    get("liveness-chart").addEventListener("keydown", (event) => {
      const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (by) { event.preventDefault(); live(Math.min(Math.max(at + by, 0), ipu.liveness.op.length - 1)); }
    });
  }

  function show(one) {
    ipu = one;
    const {memory: own, liveness} = ipu, opName = own.peak_op === null ? "" : `, while ${report.estimate.ops.text("name", own.peak_op)} runs`;
    get("memory-text").textContent = `The fullest tile of IPU ${ipu.ipu} is tile ${own.worst_tile} with ${size(own.peak)} of ${size(own.capacity)} (${percent(own.peak / own.capacity)})${opName}; the mean of all tiles is ${size(own.mean)}. ${size(own.always)} are always in use. ${{fits: "It fits", close: "It is close to the limit", "does not fit": "It does not fit"}[own.verdict] ?? own.verdict}.`;
    tiles();
    classes();
    if (liveness.op.length) {
      const places = Array.from(liveness.op, (_, i) => i);
      const given = [{label: "fullest tile", values: liveness.worst, stroke: "--s1"}, {label: "mean of tiles", values: liveness.mean, stroke: "--s3"}];
      plot = lines.draw(get("liveness-chart"), places, given, {label: "op", text: (i) => report.estimate.ops.text("name", liveness.op[i]), pick: live});
      let most = 0;
      liveness.worst.forEach((value, i) => { if (value > liveness.worst[most]) most = i; });
      live(most);
    }
  }

  function tiles() {
    const {tiles: peak, always_tiles: always, mean, capacity} = ipu.memory;
    const flat = (value) => new Float64Array(peak.length).fill(value);
    const given = [{label: "at the peak", values: peak, stroke: "--s1"}, {label: "always", values: always, stroke: "--s3"}, {label: "mean", values: flat(mean), stroke: "--s4", dash: [4, 4], width: 1}];
    // The limit would flatten the lines of a small program.
    if (ipu.memory.peak > 0.3 * capacity) given.push({label: "limit", values: flat(capacity), stroke: "--bad", width: 1});
    lines.draw(get("tiles-chart"), Array.from(peak, (_, i) => i), given, {label: "tile"});
  }

  function classes() {
    const entries = Object.entries(ipu.memory.classes).filter(([, one]) => one.max > 0);
    const sum = entries.reduce((total, [, one]) => total + one.max, 0) || 1;
    const shown = entries.sort((a, b) => b[1].max - a[1].max)
      .map(([name, one]) => [name, one.max / sum, `var(${CLASSES[name] ?? "--s4"})`, `${size(one.max)} on the fullest tile, ${size(one.total)} on all`]);
    get("classes").replaceChildren(shareBar(shown, "Bytes by class at the peak"));
  }

  function byIpu(ipus, choice) {
    tables.table(get("ipus-table"), [
      {title: "IPU", text: (one) => `IPU ${one.ipu}`, left: true},
      {title: "Stages", text: (one) => one.stages.join(", "), left: true, wide: true},
      {title: "Peak", text: (one) => size(one.memory.peak), value: (one) => one.memory.peak},
      {title: "of tile", text: (one) => percent(one.memory.peak / one.memory.capacity), value: (one) => one.memory.peak},
      {title: "Mean", text: (one) => size(one.memory.mean), value: (one) => one.memory.mean, wide: true},
      {title: "Always", text: (one) => size(one.memory.always), value: (one) => one.memory.always, wide: true},
      {title: "Verdict", text: (one) => one.memory.verdict, left: true},
      {title: "Busy cycles", text: (one) => amount(one.busy_cycles), value: (one) => one.busy_cycles, wide: true},
      {title: "Use", text: (one) => percent(one.use), value: (one) => one.use},
    ], ipus, {caption: "Memory and use of each IPU (simulated)", show: (one) => { choice.value = ipus.indexOf(one); show(one); }});
  }

  const columnsOf = (all) => [
    {title: "Variable", text: (i) => all.text("name", i) || "(no name)", long: true, left: true},
    {title: "Class", text: (i) => all.text("class", i), left: true},
    {title: "IPU", text: (i) => String(all.ipu[i]), value: (i) => all.ipu[i], wide: true},
    {title: "Shape", text: (i) => all.text("shape", i), left: true, wide: true},
    {title: "dtype", text: (i) => all.text("dtype", i), left: true, wide: true},
    {title: "Copies", text: (i) => String(all.copies[i]), value: (i) => all.copies[i], wide: true},
    {title: "Bytes", text: (i) => size(all.bytes[i] * all.copies[i]), value: (i) => all.bytes[i] * all.copies[i]},
    {title: "Fullest tile", text: (i) => size(all.bytes_per_tile[i] * all.copies[i]), value: (i) => all.bytes_per_tile[i] * all.copies[i]},
    {title: "Tiles", text: (i) => String(all.tiles[i]), value: (i) => all.tiles[i], wide: true},
  ];

  function variables() {
    const all = report.estimate.variables;
    tables.table(get("variables-table"), columnsOf(all), Array.from({length: all.count}, (_, i) => i), {
      caption: "Variables in the memory of IPUs", sort: 6, search: (i) => `${all.text("name", i)} ${all.text("class", i)}`, empty: "No variables.",
    });
  }

  /** Show what is live at a step of the IPU. */
  function live(step) {
    const {liveness} = ipu;
    if (step < 0 || step >= liveness.op.length) return;
    at = step;
    const op = liveness.op[step], all = report.estimate.variables;
    const there = [];
    for (let i = 0; i < all.count; i++) {
      if (all.ipu[i] === ipu.ipu && (all.first_op[i] < 0 || (all.first_op[i] <= op && op <= all.last_op[i]))) there.push(i);
    }
    const temporary = report.estimate.ops.temporary_bytes[op];
    get("live-title").textContent = `While ${report.estimate.ops.text("name", op)} runs (step ${step + 1} of ${liveness.op.length}): ${size(liveness.worst[step])} on the fullest tile, ${plural(there.length, "variable")}${temporary ? `, and ${size(temporary)} for the op itself` : ""}.`;
    tables.table(get("live-table"), columnsOf(all), there, {caption: `What is live at step ${step + 1}`, sort: 7});
    plot?.setCursor({left: plot.valToPos(step, "x"), top: 10}, false);
  }

  const redraw = () => { if (ipu) { const old = at; show(ipu); live(old); } };
  return {draw, redraw, columnsOf};
})();
