"use strict";
// Operations: the tree of modules by phase, optimizer and accumulation, and all ops.
const operations = (() => {
  const {get, element, button, breakable, badge, amount, size, percent, plural} = base;
  const OPEN = 40;
  let report = null;

  function draw(given) {
    report = given;
    const {ops, modules, purposes, without_formula: without} = report.estimate;
    if (!ops.count) return;
    get("operations").hidden = false;
    get("without-formula").textContent = without.length ? `No formula, counted as no time: ${without.slice(0, 8).join(", ")}${without.length > 8 ? ` and ${without.length - 8} more` : ""}.` : "Every op has a formula.";
    tree(modules);
    tables.table(get("purposes-table"), [
      {title: "What", text: (row) => row[0], left: true},
      {title: "Cycles", text: (row) => amount(row[2], row[5]), value: (row) => row[2]},
      {title: "Share", text: (row) => percent(row[2] / (modules[0][2] || 1)), value: (row) => row[2]},
      {title: "FLOPs", text: (row) => amount(row[3], "A"), value: (row) => row[3], wide: true},
      {title: "Ops", text: (row) => String(row[1]), value: (row) => row[1]},
      {title: "Grade", node: (row) => badge(row[5]), text: (row) => row[5]},
    ], purposes, {caption: "Optimizer and accumulation (simulated, in a call)", empty: "Nothing: this program does not train."});
    all(ops, modules[0][2] || 1);
  }

  function tree(modules) {
    const total = modules[0][2] || 1;
    const table = element("table", null, "grid tree"), head = element("tr"), body = element("tbody"), scroll = element("div", null, "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Simulated cost of modules, by phase");
    for (const [title, kind] of [["Module", "text"], ["Cycles", ""], ["Share", ""], ["Forward", ""], ["Backward", ""], ["Update", ""], ["FLOPs", "wide"], ["Variables", "wide"], ["Temporary", "wide"], ["Grade", ""]]) {
      const cell = element("th", title, kind);
      cell.scope = "col";
      head.append(cell);
    }
    const children = new Map(), has = new Map();
    modules.forEach((row) => {
      const parent = row[0] === "" ? null : row[0].includes(".") ? row[0].slice(0, row[0].lastIndexOf(".")) : "";
      if (parent !== null) { if (!children.has(parent)) children.set(parent, []); children.get(parent).push(row); }
      has.set(row[0], row);
    });
    const open = new Set([""]);
    // Open the largest modules first, as long as the table stays short.
    let lines = 1 + (children.get("")?.length ?? 0);
    for (const row of [...modules].sort((a, b) => a[1] - b[1] || b[2] - a[2])) {
      const more = children.get(row[0])?.length ?? 0;
      if (row[0] !== "" && more && open.has(parentOf(row[0])) && lines + more <= OPEN) { open.add(row[0]); lines += more; }
    }

    function rows() {
      const made = [];
      const visit = (row) => {
        made.push(line(row));
        if (open.has(row[0])) for (const one of children.get(row[0]) ?? []) visit(one);
      };
      visit(modules[0]);
      body.replaceChildren(...made);
    }

    function line(row) {
      const [path, depth, cycles, flops, bytes, grade, forward, backward, update, setup] = row;
      const made = element("tr"), name = element("td", null, "text long"), inner = children.get(path);
      name.style.paddingLeft = `${8 + 16 * depth}px`;
      if (inner) {
        const fold = button(open.has(path) ? "\u25be" : "\u25b8", (event) => {
          event.stopPropagation();
          if (open.has(path)) open.delete(path); else open.add(path);
          rows();
          body.querySelector(`button.fold[data-path="${CSS.escape(path)}"]`)?.focus();
        }, "fold");
        fold.dataset.path = path;
        fold.setAttribute("aria-expanded", String(open.has(path)));
        fold.setAttribute("aria-label", `${open.has(path) ? "Close" : "Open"} ${path || "all"}`);
        name.append(fold);
      } else name.append(element("span", "", "fold"));
      name.append(breakable(button(undefined, () => filter(path)), path === "" ? "(all)" : path.slice(path.lastIndexOf(".") + 1)));
      made.append(name, cell(amount(cycles, grade)), cell(percent(cycles / total)));
      for (const phase of [forward, backward, update]) made.append(cell(amount(phase[1], phase[4])));
      const most = Math.max(...[forward, backward, update, setup].map((phase) => phase[3]));
      made.append(cell(amount(flops, "A"), "wide"), cell(size(bytes), "wide"), cell(size(most), "wide"));
      const last = element("td");
      last.append(grade === "-" ? "\u2013" : badge(grade));
      made.append(last);
      made.addEventListener("click", () => filter(path));
      return made;
    }

    rows();
    table.append(element("thead"), body);
    table.firstChild.append(head);
    scroll.append(table);
    get("modules-table").replaceChildren(scroll);
  }

  const parentOf = (path) => (path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "");
  const cell = (text, kind) => element("td", text, kind);
  let search = null;

  /** Show only the ops of a module. */
  function filter(path) {
    search.value = path;
    search.dispatchEvent(new Event("input"));
  }

  function all(ops, total) {
    const made = tables.table(get("ops-table"), [
      {title: "Op", text: (i) => ops.text("name", i), long: true, left: true},
      {title: "Kind", text: (i) => ops.text("kind", i), left: true, wide: true},
      {title: "Module", text: (i) => ops.text("module", i), long: true, left: true, wide: true},
      {title: "Phase", text: (i) => ops.text("phase", i), left: true, wide: true},
      {title: "Cycles", text: (i) => amount(ops.total(i), ops.text("grade", i)), value: (i) => ops.total(i)},
      {title: "Share", text: (i) => percent(ops.total(i) / total), value: (i) => ops.total(i)},
      {title: "Times", text: (i) => String(ops.executions[i]), value: (i) => ops.executions[i], wide: true},
      {title: "FLOPs", text: (i) => amount(ops.flops[i] * ops.executions[i], "A"), value: (i) => ops.flops[i] * ops.executions[i], wide: true},
      {title: "Temporary", text: (i) => size(ops.temporary_bytes[i]), value: (i) => ops.temporary_bytes[i], wide: true},
      {title: "Grade", node: (i) => badge(ops.text("grade", i)), text: (i) => ops.text("grade", i)},
    ], Array.from({length: ops.count}, (_, i) => i), {
      caption: "Ops in the program's order (simulated, in a call)", search: (i) => ["name", "kind", "module", "phase"].map((name) => ops.text(name, i)).join(" "), show: detail,
    });
    search = made.input;
  }

  /** Show all that is known of an op. */
  function detail(i) {
    const {ops, variables} = report.estimate, box = get("op-detail"), grade = ops.text("grade", i);
    const words = {A: "published", B: "fitted", C: "assumed"};
    const parts = ["compute", "exchange", "sync", "glue"].map((name) => `${name} ${amount(ops[name][i], grade)}`).join(", ");
    const names = (side) => ops.side(side, i).map((one) => `${variables.text("name", one) || "(no name)"} (${variables.text("shape", one) || "scalar"} ${variables.text("dtype", one)})`).join(", ") || "none";
    box.hidden = false;
    box.replaceChildren(
      breakable(element("b"), ops.text("name", i)),
      element("p", `${ops.text("kind", i)}, ${ops.text("phase", i)}, stage ${ops.stage[i]}, IPU ${ops.ipu[i]}${ops.recomputed[i] ? ", computed again for the backward pass" : ""}. ${ops.text("source", i)}`, "muted"),
      element("p", ops.text("formula", i) ? `${amount(ops.cycles[i], grade)} cycles each time (simulated): ${parts}. ${plural(ops.executions[i], "time")} in a call.` : "There is no formula for this op: it counts as no time."),
      element("p", ops.text("formula", i) ? `Formula: ${ops.text("formula", i)}, ${words[grade] ?? "no grade"} (${grade}).${ops.text("plan", i) ? ` Plan: ${ops.text("plan", i)}.` : ""} ${size(ops.temporary_bytes[i])} for itself on the fullest tile.` : ""),
      breakable(element("p"), `Reads: ${names("inputs")}`),
      breakable(element("p"), `Writes: ${names("outputs")}`),
    );
    box.scrollIntoView({block: "nearest"});
    box.focus({preventScroll: true});
  }

  return {draw, detail};
})();
