"use strict";
// Tables: sorted by a click, searched, shown in parts; rows that show something are buttons.
const tables = (() => {
  const {element, button, breakable, plural} = base;
  const PART = 200;

  /**
   * Put a table into a box.
   *
   * Columns: {title, text(row), value(row), long, left, wide, node(row)}; rows are anything.
   * Options: caption, search(row): text to search in, show(row): called for a chosen row,
   * sort: number of a column that sorts at first, empty: what to say without rows.
   */
  function table(box, columns, rows, {caption, search, show, sort = null, empty = "None."} = {}) {
    const state = {sort, down: true, limit: PART, words: [], current: null};
    const scroll = element("div", null, "scroll"), made = element("table", null, "grid");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", caption);
    const head = element("thead"), body = element("tbody"), line = element("tr");
    made.append(head, body);
    head.append(line);
    scroll.append(made);
    const found = element("span", "", "muted found"), more = button("", () => { state.limit += 2 * PART; draw(); }, "more");
    found.setAttribute("role", "status");
    const input = element("input", null, "search");
    columns.forEach((column, place) => {
      const cell = element("th", null, css(column));
      cell.scope = "col";
      cell.append(button(column.title, () => sortBy(place, cell)));
      line.append(cell);
    });
    if (search) {
      const bar = element("div", null, "bar");
      input.type = "search";
      input.placeholder = "Search";
      input.setAttribute("aria-label", `Search: ${caption}`);
      input.addEventListener("input", () => { state.words = input.value.toLowerCase().split(/\s+/).filter(Boolean); state.limit = PART; draw(); });
      bar.append(input, found);
      box.replaceChildren(bar, scroll, more);
    } else box.replaceChildren(scroll, more);

    function sortBy(place, cell) {
      const first = !columns[place].left;
      if (state.sort !== place) { state.sort = place; state.down = first; }
      else if (state.down === first) state.down = !first;
      else state.sort = null;
      line.querySelectorAll("th").forEach((one) => one.removeAttribute("aria-sort"));
      if (state.sort !== null) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      draw();
    }

    function chosen() {
      const some = state.words.length ? rows.filter((row) => { const text = search(row).toLowerCase(); return state.words.every((word) => text.includes(word)); }) : rows;
      if (state.sort === null) return some;
      const {value, text} = columns[state.sort], key = value ?? text, sign = state.down ? -1 : 1;
      return [...some].sort((a, b) => {
        const one = key(a), other = key(b);
        if (one === null || other === null) return (one === null) - (other === null);
        if (typeof one === "string") return sign * one.localeCompare(other, "en", {numeric: true});
        return sign * (one - other);
      });
    }

    function draw() {
      const all = chosen();
      body.replaceChildren(...all.slice(0, state.limit).map(tableRow));
      if (!all.length) {
        const cell = element("td", state.words.length ? "Nothing has these words." : empty, "empty"), row = element("tr");
        cell.colSpan = columns.length;
        row.append(cell);
        body.append(row);
      }
      found.textContent = all.length === rows.length ? "" : `${all.length} of ${rows.length}`;
      const rest = all.length - state.limit;
      more.hidden = rest <= 0;
      more.textContent = `Show ${Math.min(rest, 2 * PART)} more of ${plural(rest, "row")}`;
    }

    function tableRow(row) {
      const cells = element("tr", null, show ? "" : "plain");
      columns.forEach((column, place) => {
        const cell = element("td", null, css(column));
        if (column.node) cell.append(column.node(row));
        else if (show && place === 0) {
          const name = button(undefined, (event) => { event.stopPropagation(); pick(row, cells); });
          cell.append(breakable(name, column.text(row)));
        } else if (column.long) breakable(cell, column.text(row));
        else cell.textContent = column.text(row);
        cells.append(cell);
      });
      if (show) cells.addEventListener("click", () => pick(row, cells));
      if (show && row === state.current) cells.setAttribute("aria-current", "true");
      return cells;
    }

    function pick(row, cells) {
      state.current = row;
      body.querySelectorAll("[aria-current]").forEach((one) => one.removeAttribute("aria-current"));
      cells.setAttribute("aria-current", "true");
      show(row);
    }

    if (sort !== null) line.children[sort].setAttribute("aria-sort", "descending");
    draw();
    return {input, draw};
  }

  const css = (column) => [column.long ? "long" : "", column.left ? "text" : "", column.wide ? "wide" : ""].filter(Boolean).join(" ");

  /** Move the focus from row to row. */
  function step(event, by) {
    const inside = event.target.closest?.(".grid, .scroll, .search");
    if (!inside) return;
    const buttons = [...inside.parentElement.closest("div:has(.scroll), section").querySelectorAll("tbody button:not(.fold)")];
    const place = buttons.indexOf(event.target);
    const next = buttons[place < 0 ? (by > 0 ? 0 : -1) : place + by];
    if (next) { event.preventDefault(); next.focus(); }
  }

  function keys(event) {
    const typing = event.target.closest?.("input, select");
    if (event.key === "/" && !typing) {
      const search = document.querySelector("#ops-table .search");
      if (search && search.offsetParent) { event.preventDefault(); search.focus(); }
    } else if (event.key === "Escape" && typing?.matches(".search")) { typing.value = ""; typing.dispatchEvent(new Event("input")); }
    else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !event.target.matches?.("select, canvas")) step(event, event.key === "ArrowDown" ? 1 : -1);
  }

  return {table, keys};
})();
