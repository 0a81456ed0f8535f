"use strict";
// The execution: what each IPU does when (simulated), what this computer did (measured), the schedule.
const execution = (() => {
  const {get, element, amount, size, time, plural, percent} = base;
  const FILLS = {forward: "--forward", backward: "--backward", update: "--update", waiting: "--waiting", "copies forward": "--copies", "copies backward": "--copies", "all-reduce": "--copies", calls: "--host", "left out": "--left"};

  const LEGEND = [["forward", "--forward"], ["backward", "--backward"], ["weight update", "--update"], ["links", "--copies"], ["host", "--host"], ["waits (bubble)", "--waiting"]];
  /** Return ``F3`` for ``forward 3``. */
  const brief = (label) => label.replace(/^(forward|backward)( (\d+))?$/, (_, kind, __, step) => kind[0].toUpperCase() + (step ?? ""));

  function draw(report) {
    const estimate = report.estimate, runs = report.runs;
    get("execution").hidden = !(estimate?.blocks.count || runs.length);
    if (estimate?.blocks.count) {
      get("execution-simulated").hidden = false;
      const some = estimate.training ? "one weight update" : "one run of the schedule";
      get("execution-note").textContent = `${some}; a period that repeats is shown twice. Choose a block to see its ops and tensors.`;
      const first = Math.max(...estimate.blocks.begin.map((begin, i) => (estimate.blocks.text("kind", i) === "left out" && /iteration/.test(estimate.blocks.text("name", i)) ? 0 : begin + estimate.blocks.length[i])));
      simulated(report, get("execution-chart"), get("execution-detail"), {view: first}, get("execution-live"));
      schedule(estimate);
    }
    if (runs.length) measured(runs);
  }

  /** Draw the simulated blocks of a report into a box. */
  function simulated(report, box, out, {end, view} = {}, live = null) {
    const {estimate} = report, {blocks: all} = estimate;
    const rows = [], numbers = new Map();
    const rowOf = (i) => {
      const kind = all.text("kind", i), pid = all.pid[i];
      const label = pid === all.host ? "host" : /^copies|^all-reduce/.test(kind) ? `IPU ${pid} links` : `IPU ${pid}`;
      if (!numbers.has(label)) numbers.set(label, -1);
      return label;
    };
    const labels = Array.from({length: all.count}, (_, i) => rowOf(i));
    [...numbers.keys()].sort((a, b) => (a === "host") - (b === "host") || a.localeCompare(b, "en", {numeric: true})).forEach((label) => { numbers.set(label, rows.length); rows.push(label); });
    const given = labels.map((label, i) => ({
      row: numbers.get(label), begin: all.begin[i], length: all.length[i], fill: FILLS[all.text("kind", i)] ?? "--forward", label: all.text("name", i), short: brief(all.text("name", i)), kind: all.text("kind", i), at: i,
    }));
    return blocks.chart(box, rows, given, {end, view, legend: LEGEND, label: `Simulated execution of ${report.name}: ${rows.join(", ")}`, pick: (place) => { if (place >= 0) show(report, given[place], out, live); }});
  }

  /** Say what a block is, and which ops and tensors belong to it. */
  function show(report, one, out, live) {
    const {ops, blocks: all, variables} = report.estimate, stage = all.stage[one.at], ipu = all.pid[one.at];
    const head = element("p"), name = element("b", `${one.label}`);
    head.append(name, ` \u00b7 ${ipu === all.host ? "host" : `IPU ${ipu}`}${stage >= 0 ? `, stage ${stage}` : ""} \u00b7 ${amount(all.cycles[one.at])} cycles, ${time(one.length / 1e6)} (simulated), begins at ${time(one.begin / 1e6)}`);
    out.replaceChildren(head);
    if (live) live.replaceChildren();
    if (!["forward", "backward", "update"].includes(one.kind)) return;
    const own = [];
    for (let i = 0; i < ops.count; i++) if (ops.text("phase", i) === one.kind && (one.kind === "update" ? ops.ipu[i] === ipu : ops.stage[i] === stage)) own.push(i);
    const made = new Set(own.flatMap((i) => ops.side("outputs", i)));
    const bytes = [...made].reduce((sum, i) => sum + variables.bytes[i], 0);
    out.append(element("p", `${plural(own.length, "op")}, ${plural(made.size, "tensor")} written, ${size(bytes)}.`, "muted"));
    if (!live) return;
    tables.table(live, [
      {title: "Op", text: (i) => ops.text("name", i), long: true, left: true},
      {title: "Writes", text: (i) => ops.side("outputs", i).map((v) => variables.text("name", v)).join(", "), long: true, left: true, wide: true},
      {title: "Cycles each", text: (i) => amount(ops.cycles[i], ops.text("grade", i)), value: (i) => ops.cycles[i]},
      {title: "Grade", node: (i) => base.badge(ops.text("grade", i)), text: (i) => ops.text("grade", i)},
    ], own, {caption: `Ops of ${one.label}, in order (simulated)`, show: operations.detail});
  }

  function measured(runs) {
    get("execution-measured").hidden = false;
    const choice = get("measured-run");
    choice.replaceChildren(...runs.map((run, i) => new Option(`${run.number}`, i)));
    const draw = () => {
      const run = runs[choice.value], threads = [...new Set(run.thread)].sort((a, b) => a - b);
      get("measured-text").textContent = `${time(run.seconds)} measured on this computer${run.count ? `, ${plural(run.count, "action")} of stages on ${plural(threads.length, "thread")}` : "; the actions of its stages were not recorded"}${run.left_out ? `, ${run.left_out} more are not shown` : ""}.`;
      const rows = ["call", ...threads.map((thread) => `thread ${thread}`)];
      const given = [{row: 0, begin: 0, length: 1e6 * run.seconds, fill: "--host", label: `call ${run.number}`}];
      for (let i = 0; i < run.count; i++) {
        const kind = report.texts[run.kind[i]], step = run.micro_batch[i] < 0 ? "" : ` ${run.micro_batch[i]}`;
        given.push({row: 1 + threads.indexOf(run.thread[i]), begin: 1e6 * run.begin[i], length: 1e6 * run.length[i], fill: FILLS[kind] ?? "--s4", label: `${kind}${step}`, short: brief(`${kind}${step}`), stage: run.stage[i]});
      }
      given.sort((a, b) => a.begin - b.begin);
      blocks.chart(get("measured-chart"), rows, given, {label: `Measured execution of call ${run.number} on this computer`, pick: (place) => {
        if (place < 0) return;
        const one = given[place];
        get("measured-detail").textContent = `${one.label}${one.stage >= 0 ? `, stage ${one.stage}` : ""}: ${time(one.length / 1e6)}, measured on this computer, begins at ${time(one.begin / 1e6)}.`;
      }});
    };
    const report = base.current;
    choice.addEventListener("change", draw);
    choice.value = runs.length - 1;
    draw();
  }

  const MOST_SLOTS = 300;

  function schedule(estimate) {
    const {name, stretches} = estimate.schedule;
    get("schedule").hidden = false;
    const count = stretches.reduce((sum, one) => sum + one.times * one.slots.length, 0);
    get("schedule-text").textContent = `${name}: ${plural(count, "slot")}. F: forward, B: backward, U: weight update, with the number of the micro-batch; empty: the IPU waits. Slots under \u00d7 n repeat n times, each time one micro-batch later.`;
    const table = element("table", null, "schedule"), times = element("tr"), body = element("tbody"), shown = [];
    times.append(element("th", "IPU"));
    for (const stretch of stretches) {
      const room = MOST_SLOTS - shown.length;
      if (room <= 0) break;
      const slots = stretch.slots.slice(0, room);
      const head = element("th", stretch.times > 1 ? `\u00d7 ${stretch.times}` : "", "first");
      head.colSpan = slots.length;
      head.scope = "colgroup";
      times.append(head);
      slots.forEach((slot, i) => shown.push({slot, first: i === 0}));
    }
    for (const {ipu} of estimate.ipus) {
      const line = element("tr"), head = element("th", `IPU ${ipu}`);
      head.scope = "row";
      line.append(head);
      for (const {slot, first} of shown) {
        const own = slot.actions.filter((one) => one.ipu === ipu), cell = element("td", undefined, `${own.length ? "" : "idle"} ${first ? "first" : ""}`);
        cell.title = `${amount(slot.cycles)} cycles (simulated)`;
        own.forEach((one, i) => {
          if (i) cell.append(" ");
          cell.append(element("i", `${one.kind[0].toUpperCase()}${one.micro_batch ?? ""}`, one.kind));
        });
        if (!own.length) cell.setAttribute("aria-label", "waits");
        line.append(cell);
      }
      body.append(line);
    }
    table.append(element("thead"), body);
    table.firstChild.append(times);
    get("schedule-grid").replaceChildren(table);
    tables.table(get("stash-table"), [
      {title: "Tensor", text: (one) => one.name || "(no name)", long: true, left: true},
      {title: "Stage", text: (one) => String(one.stage), value: (one) => one.stage},
      {title: "Copies", text: (one) => String(one.copies), value: (one) => one.copies},
      {title: "Bytes of one", text: (one) => size(one.bytes), value: (one) => one.bytes},
      {title: "Bytes of all", text: (one) => size(one.bytes * one.copies), value: (one) => one.bytes * one.copies},
    ], estimate.stash, {caption: "Tensors that are kept for several micro-batches", sort: 4, empty: "None: no tensor is kept for a later micro-batch."});
    tables.table(get("links-table"), [
      {title: "From", text: (one) => `IPU ${one.from}`, left: true},
      {title: "To", text: (one) => `IPU ${one.to}`, left: true},
      {title: "Pass", text: (one) => one.direction, left: true},
      {title: "Bytes", text: (one) => size(one.bytes), value: (one) => one.bytes},
      {title: "Cycles (simulated)", text: (one) => amount(one.cycles), value: (one) => one.cycles},
      {title: "of update", text: (one) => percent(one.cycles / (estimate.update.cycles || 1)), value: (one) => one.cycles, wide: true},
    ], estimate.links, {caption: "Copies between IPUs", empty: "None: one IPU, or nothing crosses."});
  }

  return {draw, simulated};
})();
