"use strict";
// The summary, with its shares, and the insights.
const summary = (() => {
  const {get, element, amount, time, percent, shareBar, breakable, plural} = base;

  function draw(report) {
    const estimate = report.estimate;
    get("subtitle").textContent = `${report.static.training ? "Training" : "Inference"} \u00b7 made ${report.created.replace("T", " ").slice(0, 19)} \u00b7 process ${report.pid} \u00b7 popsim_torch ${report.version}`;
    get("simulated").hidden = !estimate;
    get("verdict").replaceChildren(estimate ? verdict(estimate.verdict) : element("p", `There is no estimate of what this program would cost on an IPU: ${report.why_no_estimate}. The page shows what was measured on this computer.`, "notice"));
    get("figures").replaceChildren(...report.summary.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
    details("options-box", "options", report.static.options);
    get("app-box").hidden = !Object.keys(report.app).length;
    get("app").textContent = JSON.stringify(report.app, null, 1);
    if (!estimate) return;
    grades(estimate);
    parts(estimate);
    insights(estimate.insights);
  }

  function verdict(word) {
    const texts = {fits: "Memory: it fits", close: "Memory: close to the limit; it may or may not fit", "does not fit": "Memory: it does not fit"};
    return element("p", `${texts[word] ?? word} (simulated)`, `verdict ${word === "fits" ? "fits" : word === "close" ? "close" : "not"}`);
  }

  function details(box, list, values) {
    const shown = Object.entries(values).filter(([, value]) => value !== null);
    get(box).hidden = !shown.length;
    get(list).replaceChildren(...shown.flatMap(([name, value]) => [element("dt", name), element("dd", typeof value === "string" ? value : JSON.stringify(value))]));
  }

  function grades(estimate) {
    const words = {A: "A published formulas", B: "B fitted formulas", C: "C assumed formulas"};
    const entries = Object.entries(estimate.grades).map(([grade, share]) => [words[grade], share, `var(--${grade.toLowerCase()})`, percent(share)]);
    get("grades").replaceChildren(element("h3", "Grades of the op cycles (simulated)"), shareBar(entries, "Grades of the op cycles"));
    if (estimate.without_formula.length) get("grades").append(element("p", `No formula, counted as no time: ${plural(estimate.without_formula.length, "op")}.`, "muted"));
  }

  const FILLS = {compute: "--forward", exchange: "--update", sync: "--s2", glue: "--s4", links: "--copies", host: "--host", update: "--a", all_reduce: "--b", waiting: "--waiting"};

  function parts(estimate) {
    const {cycles} = estimate.call;
    const entries = Object.entries(estimate.call.parts).filter(([, value]) => value > 0)
      .map(([name, value]) => [name.replace("_", "-"), value / (cycles || 1), `var(${FILLS[name] ?? "--s4"})`, `${amount(value)} (${percent(value / (cycles || 1))})`]);
    get("parts").replaceChildren(element("h3", "Cycles of a call, on the busiest IPU (simulated)"), shareBar(entries, "Cycles of a call"));
    const {host_to_ipu, compute, ipu_to_host, round_trip} = estimate.latency;
    get("latency").replaceChildren(element("p", `Latency of a micro-batch (simulated): ${time(host_to_ipu)} from the host, ${time(compute)} compute, ${time(ipu_to_host)} to the host; round trip ${time(round_trip)}.`, "muted"));
  }

  function insights(found) {
    const titles = {tensor: "Largest tensors", stage: "Longest stages", op: "Longest ops"};
    get("insights").hidden = false;
    get("insight-lists").replaceChildren(...Object.entries(titles).map(([about, title]) => {
      const box = element("div"), list = element("ol");
      for (const one of found.filter((entry) => entry.about === about)) {
        const item = element("li");
        const head = breakable(element("b"), one.name);
        item.append(head, element("p", one.figure, "muted"), element("p", one.advice), element("p", one.effect, "effect"));
        list.append(item);
      }
      box.append(element("h3", title), list.children.length ? list : element("p", "None.", "muted"));
      return box;
    }));
  }

  return {draw, verdict};
})();
