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

  // ---- tables that are wider than their place say so
  const scrolls = [...document.querySelectorAll(".scroll")];
  const cue = (region) => region.classList.toggle("more", region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
  const cues = new ResizeObserver((entries) => entries.forEach(({ target }) => cue(target)));
  for (const region of scrolls) {
    cues.observe(region);
    region.addEventListener("scroll", () => cue(region), { passive: true });
  }

  // ---- charts
  const options = { actions: false, logLevel: 1, renderer: "svg", ast: true, tooltip: { theme: "custom" } };
  const narrow = 600;
  const longest = (spec) => { // of the names in its legends, characters
    let most = 0;
    JSON.stringify(spec, (key, value) => {
      if (key === "domain" && Array.isArray(value)) for (const name of value) most = Math.max(most, String(name).length);
      return value;
    });
    return most;
  };
  const fitted = (spec, width) => { // legends wrap, and on a telephone names take at most a part of the width
    const rows = spec.encoding?.y?.type === "nominal" ? spec.encoding.y : null; // their names stand left of the legend
    const room = width - (rows ? Math.min(7 * longest(rows), width < narrow ? 0.42 * width : 260) + 16 : 0);
    const names = Math.min(260, 7 * longest(spec.encoding ? { ...spec, encoding: { ...spec.encoding, y: null } } : spec)) + 40;
    return JSON.parse(JSON.stringify(spec, (key, value) => {
      if (key === "legend" && value?.columns) {
        const columns = Math.max(1, Math.min(6, Math.floor(room / names)));
        return { ...value, columns, labelLimit: Math.min(value.labelLimit, room / columns - 40) };
      }
      if (width < narrow && key === "labelLimit") return Math.min(value, 0.42 * width);
      if (width < narrow && key === "limit") return Math.min(value, 0.4 * width);
      if (width < narrow && key === "tickCount") return 3;
      return value;
    }));
  };
  const scaled = (spec, scale) => // the same chart on the other scale: only the switched axis has a fixed domain
    JSON.parse(JSON.stringify(spec, (key, value) => (key === "scale" && value && value.clamp ? scale : value)));
  const draw = async (plot, spec) => {
    plot.chart?.finalize();
    plot.spec = spec;
    plot.drawnAt = plot.clientWidth;
    plot.chart = await vegaEmbed(plot, fitted(spec, plot.clientWidth), options);
    for (const empty of plot.querySelectorAll("[role=graphics-symbol]:not([aria-label])")) empty.removeAttribute("role");
    plot.style.minHeight = "";
  };
  // ---- a chart as a file, drawn anew: an image has no style sheet, so that colours by name become what they are now
  const resolved = (spec) => {
    const probe = document.createElement("span");
    document.body.append(probe);
    const colour = (name) => {
      probe.style.color = name;
      return getComputedStyle(probe).color;
    };
    const copy = JSON.parse(JSON.stringify(spec, (key, value) =>
      typeof value === "string" && value.startsWith("var(--") ? colour(value) : value));
    copy.config.background = colour("var(--paper)");
    copy.title = { text: spec.usermeta?.title ?? "", anchor: "start", color: colour("var(--ink)"), fontSize: 14 };
    probe.remove();
    return { ...copy, width: 900, padding: 16 };
  };
  const save = async (plot, kind) => {
    const figure = plot.closest("figure");
    const title = figure.querySelector("figcaption strong").textContent;
    const { view } = await vegaEmbed(document.createElement("div"), resolved({ ...plot.spec, usermeta: { title } }), options);
    const link = document.createElement("a");
    link.download = `${figure.id}.${kind}`;
    link.href = kind === "png"
      ? await view.toImageURL("png", 2)
      : URL.createObjectURL(new Blob([await view.toSVG()], { type: "image/svg+xml" }));
    link.click();
    view.finalize();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const addExports = (plot) => {
    const row = document.createElement("div");
    row.className = "export";
    for (const kind of ["svg", "png"]) {
      const control = document.createElement("button");
      control.type = "button";
      control.textContent = kind.toUpperCase();
      control.setAttribute("aria-label", `Save the chart as ${kind.toUpperCase()}`);
      control.addEventListener("click", () => save(plot, kind));
      row.append(control);
    }
    plot.before(row);
  };
  const prepare = async (plot) => {
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
    await draw(plot, spec);
    addExports(plot);
  };
  const plots = [...document.querySelectorAll(".plot")];
  let resized;
  addEventListener("resize", () => { // a telephone that is turned
    clearTimeout(resized);
    resized = setTimeout(() => {
      for (const plot of plots) {
        if (plot.chart && Math.min(plot.drawnAt, plot.clientWidth) < narrow && plot.drawnAt !== plot.clientWidth) draw(plot, plot.spec);
      }
    }, 200);
  });
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
