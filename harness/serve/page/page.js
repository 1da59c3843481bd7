// Asks /status every second and shows it. Rates are differences of two answers; what is in /status is shown as text only.
"use strict";

const EVERY_MS = 1000;
const KEPT_S = 120;
const RECENT_S = 10;
const byId = (id) => document.getElementById(id);
const samples = [];
let key = sessionStorage.getItem("key") || "";

function number(value, digits = 1) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
}

function duration(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

function bytes(count) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const element = document.createElement("td");
    if (cell instanceof Node) { element.className = "track"; element.append(cell); }
    else { element.textContent = cell.text ?? cell; if (cell.text !== undefined) element.className = "number"; }
    line.append(element);
  }
  return line;
}

function meter(share, words) {
  const element = document.createElement("meter");
  element.value = Math.min(1, share);
  element.setAttribute("aria-label", words);
  return element;
}

function fill(table, rows) {
  byId(table).tBodies[0].replaceChildren(...rows);
}

// The sample from which the last seconds count.
function since(seconds) {
  const now = samples.at(-1).time_s;
  return samples.find((sample) => now - sample.time_s <= seconds) ?? samples.at(-1);
}

function showSpeed() {
  const points = [];
  const now = samples.at(-1).time_s;
  for (let i = 1; i < samples.length; i++) {
    const [a, b] = [samples[i - 1], samples[i]];
    points.push([KEPT_S - (now - b.time_s), (b.generated_tokens - a.generated_tokens) / (b.time_s - a.time_s)]);
  }
  const most = Math.max(...points.map(([, rate]) => rate), 0);
  byId("line").setAttribute("points", points.map(([x, rate]) => `${x},${40 - 38 * rate / (most || 1)}`).join(" "));
  byId("most").textContent = number(most);
  byId("chart-words").textContent = `at most ${number(most)} tokens a second, now ${byId("rate").textContent}`;
}

function show(now) {
  if (samples.length && now.passes < samples.at(-1).passes) samples.length = 0; // it was started again
  samples.push(now);
  while (now.time_s - samples[0].time_s > KEPT_S) samples.shift();
  const then = since(RECENT_S);
  const [seconds, passes, passing] = ["time_s", "passes", "pass_s"].map((name) => now[name] - then[name]);

  byId("model").textContent = now.model;
  byId("state").textContent = `${now.state}${now.reason ? `: ${now.reason}` : ""}, up ${duration(now.uptime_s)}`;
  byId("state").className = now.state === "serving" ? "" : "bad";
  byId("rate").textContent = seconds ? number((now.generated_tokens - then.generated_tokens) / seconds) : "–";
  byId("running").textContent = now.running;
  byId("waiting").textContent = now.waiting;
  byId("rows").textContent = passes ? number((now.rows - then.rows) / passes) : "–";
  byId("pass").textContent = passes ? number(passing / passes, 3) : "–";
  byId("hits").textContent = now.prefix_hit_tokens.toLocaleString("en");
  showSpeed();

  fill("tasks", Object.entries(now.task_s).map(([task, total]) => {
    const share = passing ? (total - (then.task_s[task] ?? 0)) / passing : 0;
    const words = `${Math.round(100 * share)} %`;
    return row(task.replaceAll("_", " "), meter(share, `${task} ${words}`), {text: words});
  }));
  fill("blocks", Object.entries(now.kv_blocks).map(([tier, {used, total}]) =>
    row(tier, meter(total ? used / total : 0, `${tier}: ${used} of ${total} blocks`), {text: `${used} / ${total} blocks`})));
  const store = now.kv_store;
  byId("store").textContent = !store ? "" : `Kept for later: ${Object.keys(store.blocks).map((tier) =>
    `${store.blocks[tier]} blocks in ${tier}, ${store.hit_tokens[tier]} tokens read back (${bytes(store.bytes_read[tier])})`)
    .join("; ")}${store.problem ? `. ${store.problem}` : ""}`;

  fill("pending", now.requests.map((request) => row(request.id, {text: request.prompt_tokens},
    {text: request.tokens}, {text: request.max_tokens}, {text: duration(request.age_s)})));
  const more = now.pending - now.requests.length;
  byId("more").textContent = more > 0 ? `and ${more} more` : now.requests.length ? "" : "none";
  byId("batch-section").hidden = !now.batches.length;
  fill("batch-rows", now.batches.map((batch) => {
    const done = batch.completed + batch.failed;
    return row(batch.id, meter(batch.total ? done / batch.total : 0, `${done} of ${batch.total} lines`),
      {text: `${done} / ${batch.total} lines, ${batch.status.replaceAll("_", " ")}`});
  }));
  byId("all").hidden = false;
}

async function look() {
  try {
    const answer = await fetch("status", {headers: key ? {authorization: `Bearer ${key}`} : {}});
    byId("ask").hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else if (answer.status === 401) { byId("all").hidden = true; byId("state").textContent = key ? "wrong key" : "locked"; }
    else throw new Error(`status ${answer.status}`);
  } catch (problem) {
    byId("state").textContent = `no answer (${problem.message})`;
    byId("state").className = "bad";
  }
  setTimeout(look, EVERY_MS);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("key", key);
});
look();
