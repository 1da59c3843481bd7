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
  const compare = (a, b, numeric) => {
    if (!numeric) return a.localeCompare(b, undefined, { numeric: true });
    const [x, y] = [number(a), number(b)];
    return x === null ? (y === null ? 0 : 1) : y === null ? -1 : x - y; // what is missing comes last
  };
  const sort = (table, heading, index) => {
    const down = heading.getAttribute("aria-sort") !== "descending";
    const numeric = heading.classList.contains("num");
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const text = (row) => row.children[index].innerText.trim();
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
      const known = rows.filter((row) => !numeric || number(text(row)) !== null);
      const missing = rows.filter((row) => !known.includes(row));
      known.sort((a, b) => compare(text(a), text(b), numeric) * (down ? -1 : 1));
      body.append(...known, ...missing);
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
    try {
      plot.chart = await vegaEmbed(plot, spec, options);
      plot.style.minHeight = "";
    } catch (error) { // one chart that cannot be drawn must not keep the others from it
      plot.textContent = "This chart cannot be drawn here; its figures are below.";
      console.error(error);
    }
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
  const start = (plot) => (waiting.delete(plot) ? prepare(plot) : Promise.resolve());
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
          return void requestIdleCallback(rest);
        }
      }
      root.dataset.charts = "drawn";
    };
    requestIdleCallback(rest);
  } else {
    for (const plot of plots) plot.textContent = "The chart needs the package vl-convert-python where the report is made; its figures are below.";
  }

  // Folded values must be on paper too.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
