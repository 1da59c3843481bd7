"use strict";
// Themes, sortable tables, and charts. Everything here adds to a page that is complete without it.
(() => {
  const root = document.documentElement;

  // ---- theme: the colours are all in CSS, charts included
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  button.hidden = false;
  label();

  // ---- tables: a button in each heading; rows stay in their group
  const number = (text) => {
    const found = text.replaceAll(",", "").match(/-?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? Number(found[0]) : null;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  const sort = (table, heading, index) => {
    const down = heading.getAttribute("aria-sort") !== "descending";
    const numeric = heading.classList.contains("num");
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      const keyed = rows.map((row) => {
        const cell = row.children[index];
        const text = cell.textContent.trim();
        return { row, key: cell.querySelector(".missing") ? null : numeric ? number(text) : text };
      });
      const known = keyed.filter(({ key }) => key !== null);
      known.sort((a, b) => compare(a.key, b.key) * (down ? -1 : 1));
      body.append(...[...known, ...keyed.filter(({ key }) => key === null)].map(({ row }) => row)); // missing ones last
    }
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, index) => {
      const control = document.createElement("button");
      control.type = "button";
      control.className = "sort";
      control.append(...heading.childNodes);
      control.addEventListener("click", () => sort(table, heading, index));
      heading.append(control);
    });
  }

  // ---- charts
  const options = { actions: false, logLevel: 1, renderer: "svg", ast: true, tooltip: { theme: "custom" } };
  const scaled = (spec, scale) => // the same chart on the other scale: only the switched axis has a fixed domain
    JSON.parse(JSON.stringify(spec, (key, value) => (key === "scale" && value && value.clamp ? scale : value)));
  const draw = async (plot, spec) => {
    plot.chart?.finalize();
    plot.chart = await vegaEmbed(plot, spec, options);
    plot.style.minHeight = "";
  };
  const prepare = (plot) => {
    const spec = JSON.parse(plot.nextElementSibling.textContent);
    const toggle = spec.usermeta?.toggle;
    delete spec.usermeta;
    if (toggle) {
      const box = document.createElement("input");
      box.type = "checkbox";
      const words = document.createElement("label");
      words.className = "toggle";
      words.append(box, ` ${toggle.label}`);
      box.addEventListener("change", () => draw(plot, box.checked ? scaled(spec, toggle.scale) : spec));
      plot.before(words);
    }
    return draw(plot, spec);
  };
  const plots = [...document.querySelectorAll(".plot")];
  const waiting = new Set(plots);
  const started = [];
  const start = (plot) => {
    if (waiting.delete(plot)) started.push(attempt(plot));
    return started.at(-1);
  };
  const attempt = async (plot) => {
    try {
      await prepare(plot);
    } catch (error) { // one chart that cannot be drawn must not keep the others from it
      plot.textContent = "This chart cannot be drawn here; its figures are below.";
      console.error(error);
    }
  };
  const idle = window.requestIdleCallback ?? ((then) => setTimeout(then, 1)); // not every browser has it
  if (window.vegaEmbed) {
    // What is in view first, the rest while nothing else is to be done: the page is there at once.
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          seen.unobserve(entry.target);
          start(entry.target);
        }
      }
    }, { rootMargin: "200px" });
    for (const plot of plots) seen.observe(plot);
    const rest = async () => {
      for (const plot of plots) {
        if (waiting.has(plot)) {
          await start(plot);
          return void idle(rest);
        }
      }
      await Promise.all(started);
      root.dataset.charts = "drawn";
    };
    idle(rest);
  } else {
    for (const plot of plots) plot.textContent = "The chart needs the package vl-convert-python where the report is made; its figures are below.";
  }

  // Folded values must be on paper too, and folded again afterwards.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of folded) details.open = false; });
})();
