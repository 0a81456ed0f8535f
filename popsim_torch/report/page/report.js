"use strict";
// Puts the page together.
(() => {
  const {get, element} = base;
  const data = JSON.parse(get("data").textContent);
  data.reports.forEach(base.decodeReport);
  base.current = data.reports[0];

  function navigation() {
    const shown = [...document.querySelectorAll("main > section:not([hidden])")];
    get("nav").replaceChildren(...shown.map((section) => {
      const link = element("a", section.querySelector("h2").firstChild.textContent.trim());
      link.href = `#${section.id}`;
      return link;
    }));
  }

  if (data.comparison) {
    get("summary").hidden = true;
    comparison.draw(data);
  } else {
    summary.draw(base.current);
    if (base.current.estimate) {
      memory.draw(base.current);
      operations.draw(base.current);
    }
    execution.draw(base.current);
  }
  navigation();
  document.addEventListener("keydown", tables.keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    blocks.redraw();
    if (data.comparison) comparison.redraw(data); else memory.redraw();
  });
  document.body.dataset.ready = "yes";
})();
