"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const {format, spark} = charts;
  const PART = 300;
  const MOST_ALARMS = 200;
  const KINDS = {nan: "NaN", inf: "infinity", zeros: "only zeros", norm: "norm explodes"};
  const COLUMNS = [
    {key: "name", title: "Tensor", text: true},
    {key: "seen", title: "Records", wide: true},
    {key: "mean", title: "Mean", wide: true},
    {key: "std", title: "Std", wide: true},
    {key: "norm", title: "Norm"},
    {key: "minimum", title: "Min", wide: true},
    {key: "maximum", title: "Max", wide: true},
    {key: "nans", title: "NaN", bad: true},
    {key: "infs", title: "inf", bad: true},
    {key: "zeros", title: "Zeros", wide: true, percent: true},
  ];
  const state = {sort: null, down: false, limit: PART, selected: null, compared: null};

  function element(tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  /** Return a button with a name, which may be broken after its parts. */
  function nameButton(name) {
    const button = element("button");
    button.type = "button";
    button.title = name;
    for (const part of name.split(/(?<=[./_])(?![./_])/)) button.append(part, element("wbr"));
    return button;
  }

  const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const percent = (value) => (typeof value === "number" ? `${format(100 * value)} %` : format(value));

  // --- Summary and alarms ---

  function summary() {
    const {records, first, last, dropped} = data.summary;
    const parts = [plural(data.tensors.length, "tensor"), plural(records, "record")];
    if (records) parts.push(first === last ? `step ${first}` : `steps ${first} to ${last}`);
    parts.push(data.alarms.length ? plural(data.alarms.length, "alarm") : "no alarms");
    if (dropped) parts.push(`${plural(dropped, "record")} dropped`);
    get("summary").textContent = `${parts.join(" \u00b7 ")} \u00b7 written ${data.made}`;
  }

  function alarms() {
    const list = get("alarm-list");
    if (!data.alarms.length) {
      list.append(element("p", data.summary.records ? "None: no NaN, no infinities, no tensor of zeros, no exploding norm." : "There are no records.", "ok"));
      return;
    }
    for (const alarm of data.alarms.slice(0, MOST_ALARMS)) {
      const line = element("button", undefined, "alarm");
      line.type = "button";
      const often = alarm.times > 1 ? `; ${alarm.times} times until step ${alarm.last}` : "";
      line.append(element("span", KINDS[alarm.kind], `badge ${alarm.kind}`), element("span", alarm.name, "name"),
        element("span", `step ${alarm.first}: ${alarm.text}${often}`, "muted"));
      line.addEventListener("click", () => show(alarm.name, true));
      list.append(line);
    }
    const rest = data.alarms.length - MOST_ALARMS;
    if (rest > 0) list.append(element("p", `and ${plural(rest, "more alarm")}`, "muted"));
  }

  // --- The table ---

  function head() {
    const row = document.querySelector("#table thead tr");
    for (const column of COLUMNS) {
      const cell = element("th", undefined, `${column.text ? "name" : ""} ${column.wide ? "wide" : ""}`);
      cell.scope = "col";
      const button = element("button", column.title);
      button.type = "button";
      button.addEventListener("click", () => sortBy(column, cell));
      cell.append(button);
      row.append(cell);
    }
    const last = element("th", "Trend");
    last.title = "Norm over time";
    last.scope = "col";
    row.append(last);
  }

  /** Sort by a column: first the largest numbers, or names from A; then the other way; then not. */
  function sortBy(column, cell) {
    const first = !column.text;
    if (state.sort !== column) { state.sort = column; state.down = first; }
    else if (state.down === first) state.down = !first;
    else state.sort = null;
    document.querySelectorAll("#table th").forEach((one) => one.removeAttribute("aria-sort"));
    if (state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    rows();
  }

  function rank(value) {
    if (value === "inf") return Infinity;
    if (value === "-inf") return -Infinity;
    return typeof value === "number" ? value : null;
  }

  function chosen() {
    const words = get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.tensors.filter((one) => words.every((word) => one.name.toLowerCase().includes(word)));
    if (!state.sort) return found;
    const {key, text} = state.sort, sign = state.down ? -1 : 1;
    return [...found].sort((a, b) => {
      if (text) return sign * a[key].localeCompare(b[key], "en", {numeric: true});
      const one = rank(a.last[key]), other = rank(b.last[key]);
      if (one === null || other === null) return (one === null) - (other === null);
      return one === other ? 0 : sign * (one < other ? -1 : 1);
    });
  }

  function rows() {
    const found = chosen();
    const body = document.querySelector("#table tbody");
    body.replaceChildren(...found.slice(0, state.limit).map(tableRow));
    if (!found.length) {
      const cell = element("td", data.tensors.length ? "No name has these words." : "There are no records.", "empty");
      cell.colSpan = COLUMNS.length + 1;
      body.append(element("tr"));
      body.firstChild.append(cell);
    }
    get("found").textContent = found.length === data.tensors.length ? "" : `${found.length} of ${data.tensors.length}`;
    const rest = found.length - state.limit;
    get("more").hidden = rest <= 0;
    get("more").textContent = `Show ${Math.min(rest, PART)} more`;
  }

  function tableRow(tensor) {
    const row = element("tr");
    row.dataset.name = tensor.name;
    if (tensor.name === state.selected) row.setAttribute("aria-current", "true");
    for (const column of COLUMNS) {
      const cell = element("td", undefined, `${column.text ? "name" : ""} ${column.wide ? "wide" : ""}`);
      if (column.text) {
        cell.append(nameButton(tensor.name));
      } else {
        const value = tensor.last[column.key];
        cell.textContent = column.percent ? percent(value) : format(value);
        if (column.bad && tensor.worst[column.key] > 0) cell.classList.add("bad");
        if (column.bad && !value && tensor.worst[column.key] > 0) cell.textContent = "0 *";
      }
      row.append(cell);
    }
    const cell = element("td");
    if (tensor.norm) cell.append(spark(tensor.norm));
    row.append(cell);
    row.addEventListener("click", () => show(tensor.name, true));
    return row;
  }

  // --- One tensor ---

  /** Return a sentence about what the charts leave out. */
  function note(tensor) {
    const parts = [`${plural(tensor.count, "value")}, ${plural(tensor.last.seen, "record")}.`];
    if (tensor.every > 1) parts.push(`The charts show one record of ${tensor.every}: the first, or one that stands out.`);
    return parts.join(" ");
  }

  function show(name, scroll) {
    const tensor = data.tensors.find((one) => one.name === name);
    if (!tensor) return;
    state.selected = name;
    document.querySelectorAll("#table tbody tr").forEach((row) => {
      if (row.dataset.name === name) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
    get("detail").hidden = false;
    get("detail-title").textContent = name;
    get("detail-note").textContent = note(tensor);
    numbers(tensor);
    drawNorm(tensor);
    drawMean(tensor);
    drawCounts(tensor);
    const heat = get("heat-figure");
    heat.hidden = !tensor.histogram;
    if (tensor.histogram) charts.heatMap(get("heat"), get("heat-value"), tensor.histogram);
    if (scroll) {
      const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      get("detail").scrollIntoView({behavior: calm ? "auto" : "smooth", block: "start"});
      get("detail-title").focus({preventScroll: true});
    }
  }

  function numbers(tensor) {
    const list = get("numbers");
    list.replaceChildren();
    const words = {absolute_mean: "mean |x|", minimum: "min", maximum: "max", nans: "NaN", infs: "inf"};
    for (const key of ["mean", "std", "norm", "absolute_mean", "minimum", "maximum", "nans", "infs", "zeros"]) {
      const value = tensor.last[key];
      if (value === null) continue;
      const box = element("div");
      box.append(element("dt", words[key] ?? key), element("dd", key === "zeros" ? percent(value) : format(value)));
      list.append(box);
    }
  }

  function drawNorm(tensor) {
    const lines = [{label: "norm", values: tensor.norm, stroke: "--s1"}, {label: "mean |x|", values: tensor.absolute_mean, stroke: "--s2"}]
      .filter((line) => line.values);
    const box = get("norm-chart");
    box.parentElement.hidden = !lines.length;
    if (!lines.length) return;
    const log = charts.spreads(lines.map((line) => charts.plain(line.values)));
    get("norm-caption").textContent = `${lines.map((line) => line.label).join(" and ").replace(/^n/, "N").replace(/^m/, "M")}${log ? ", logarithmic" : ""}`;
    charts.lines(box, tensor.x, lines, {log});
  }

  function drawMean(tensor) {
    const box = get("mean-chart");
    box.parentElement.hidden = !tensor.mean;
    if (!tensor.mean) return;
    const by = (sign) => tensor.mean.map((mean, i) => {
      const std = tensor.std?.[i];
      return typeof mean === "number" && typeof std === "number" ? mean + sign * std : null;
    });
    const fill = getComputedStyle(document.documentElement).getPropertyValue("--s1").trim() + "2e";
    const lines = [
      {label: "mean", values: tensor.mean, stroke: "--s1"},
      {label: "+ std", values: by(1), stroke: "--s1", width: 0.7},
      {label: "\u2212 std", values: by(-1), stroke: "--s1", width: 0.7},
      {label: "max", values: tensor.maximum, stroke: "--s4", width: 1, dash: [4, 3]},
      {label: "min", values: tensor.minimum, stroke: "--s4", width: 1, dash: [4, 3]},
    ].filter((line) => line.values);
    charts.lines(box, tensor.x, lines, {bands: tensor.std ? [{series: [2, 3], fill}] : []});
  }

  function drawCounts(tensor) {
    const part = (values) => values?.map((value) => (typeof value === "number" && tensor.count ? (100 * value) / tensor.count : value));
    const lines = [
      {label: "NaN", values: part(tensor.nans), stroke: "--bad"},
      {label: "inf", values: part(tensor.infs), stroke: "--s2"},
      {label: "zeros", values: part(tensor.zeros), stroke: "--s4"},
    ].filter((line) => line.values && line.values.some((value) => value > 0));
    get("counts-figure").hidden = !lines.length;
    charts.forget(get("counts-chart"));
    if (lines.length) charts.lines(get("counts-chart"), tensor.x, lines, {suffix: " %", height: 150});
  }

  // --- Two runs ---

  function difference() {
    const found = data.difference;
    if (!found) return;
    get("difference").hidden = false;
    get("difference-text").textContent = found.text;
    const row = document.querySelector("#difference-table thead tr");
    row.append(element("th", "Tensor", "name"), element("th", "First difference at step"), element("th", "Largest rel. difference of the norm"));
    document.querySelector("#difference-table tbody").replaceChildren(...found.tensors.map((one) => {
      const line = element("tr");
      line.dataset.name = one.name;
      const cell = element("td", undefined, "name");
      cell.append(nameButton(one.name));
      line.append(cell, element("td", one.first === null ? "equal" : format(one.first)), element("td", format(one.largest)));
      line.addEventListener("click", () => compare(one));
      return line;
    }));
    const first = found.tensors.find((one) => one.first !== null) ?? found.tensors[0];
    if (first) compare(first);
  }

  function compare(one) {
    state.compared = one;
    document.querySelectorAll("#difference-table tbody tr").forEach((row) => {
      if (row.dataset.name === one.name) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
    get("difference-detail").hidden = false;
    get("difference-name").textContent = one.name;
    const both = [
      {label: data.labels[0], values: one.here, stroke: "--s1"},
      {label: data.labels[1], values: one.there, stroke: "--s2", dash: [6, 4]},
    ];
    charts.lines(get("overlay-chart"), one.x, both, {log: charts.spreads(both.map((line) => charts.plain(line.values)))});
    const log = charts.spreads([charts.plain(one.relative)]);
    charts.lines(get("relative-chart"), one.x, [{label: "difference", values: one.relative, stroke: "--s2"}], {log});
  }

  // --- Keys ---

  function keys(event) {
    const typing = event.target.closest?.("input");
    if (event.key === "/" && !typing) { event.preventDefault(); get("search").focus(); }
    else if (event.key === "Escape" && typing) { typing.value = ""; rows(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") step(event, event.key === "ArrowDown" ? 1 : -1);
  }

  /** Move the focus from row to row. */
  function step(event, by) {
    const table = event.target.closest?.("table, .scroll, input");
    if (!table) return;
    const buttons = [...(table.closest("section") ?? document).querySelectorAll("tbody button")];
    const place = buttons.indexOf(event.target);
    const next = buttons[place < 0 ? (by > 0 ? 0 : -1) : place + by];
    if (next) { event.preventDefault(); next.focus(); }
  }

  function redraw() {
    if (state.selected !== null) show(state.selected, false);
    if (state.compared) compare(state.compared);
  }

  get("earlier").hidden = !data.tensors.some((one) => (one.worst.nans && !one.last.nans) || (one.worst.infs && !one.last.infs));
  summary();
  alarms();
  head();
  rows();
  charts.follow(get("heat"));
  get("search").addEventListener("input", () => { state.limit = PART; rows(); });
  get("more").addEventListener("click", () => { state.limit += PART; rows(); });
  document.addEventListener("keydown", keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const first = data.alarms[0]?.name ?? data.tensors[0]?.name;
  if (first !== undefined) show(first, false);
  difference();
})();
