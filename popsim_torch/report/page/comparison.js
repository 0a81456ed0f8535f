"use strict";
// Two reports side by side.
const comparison = (() => {
  const {get, element} = base;

  function draw(data) {
    const {comparison: found, reports} = data, {labels} = found;
    get("comparison").hidden = false;
    get("simulated").hidden = false;
    get("subtitle").textContent = `Two reports of popsim_torch. Changes are those from ${labels[0]} to ${labels[1]}. Model of the machine: ${found.validation}.`;
    get("comparison-verdicts").replaceChildren(...reports.map((one, i) => {
      const line = element("p");
      line.append(element("b", `${labels[i]}: `), one.estimate ? summary.verdict(one.estimate.verdict) : `there is no estimate: ${one.why_no_estimate}.`);
      if (one.estimate) line.append(element("span", `  Grades of op cycles: ${Object.entries(one.estimate.grades).map(([grade, share]) => `${grade} ${base.percent(share)}`).join(", ")}`, "muted"));
      return line;
    }));
    const put = (id, rows, first, caption, search) => tables.table(get(id), columns(first, labels), rows, {caption, search: search && ((row) => row[0]), empty: "Nothing to compare."});
    put("comparison-simulated", found.simulated, "Simulated", "Simulated figures of both reports");
    put("comparison-others", found.others, "Exact or measured", "Other figures of both reports");
    put("comparison-modules", found.modules, "Module", "Simulated cycles of a call by module", true);
    put("comparison-ops", found.ops, "Op", "Simulated cycles of a call by op, largest changes first", true);
    charts(reports, labels);
    tiles(reports, labels);
  }

  const columns = (first, labels) => [
    {title: first, text: (row) => row[0], long: true, left: true},
    {title: labels[0], text: (row) => row[1], value: (row) => row[4]},
    {title: labels[1], text: (row) => row[2], value: (row) => row[5]},
    {title: "Change", text: (row) => row[3], value: (row) => (row[4] ? row[5] / row[4] : null)},
  ];

  function charts(reports, labels) {
    const box = get("comparison-charts");
    const all = reports.map((one) => one.estimate?.blocks).filter(Boolean);
    const end = all.reduce((most, one) => one.begin.reduce((last, begin, i) => Math.max(last, begin + one.length[i]), most), 0);
    box.replaceChildren();
    reports.forEach((one, i) => {
      const inner = element("div");
      box.append(element("h3", labels[i]), one.estimate?.blocks.count ? inner : element("p", "There is no estimate.", "muted"));
      if (one.estimate?.blocks.count) execution.simulated(one, inner, get("comparison-detail"), {end});
    });
  }

  function tiles(reports, labels) {
    const fullest = reports.map((one) => one.estimate?.ipus.reduce((most, ipu) => (!most || ipu.memory.peak > most.memory.peak ? ipu : most), null));
    const given = fullest.map((ipu, i) => ipu && ipu.memory.tiles.length && {label: labels[i], values: ipu.memory.tiles, stroke: ["--s1", "--s2"][i]}).filter(Boolean);
    const count = given.reduce((most, one) => Math.max(most, one.values.length), 0);
    if (!count) { get("comparison-tiles").textContent = "There is no memory to compare."; return; }
    for (const one of given) one.values = Array.from({length: count}, (_, i) => one.values[i] ?? null);
    lines.draw(get("comparison-tiles"), Array.from({length: count}, (_, i) => i), given, {label: "tile"});
  }

  return {draw, redraw: (data) => tiles(data.reports, data.comparison.labels)};
})();
