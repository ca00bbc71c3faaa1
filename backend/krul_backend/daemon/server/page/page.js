// Draws the page of a daemon: it asks the daemon what it keeps, and the server what it restored and why not.
// Texts come from users (request ids, tenants, errors): they only ever become text nodes.
"use strict";

const ASK_EVERY_MS = 3000, NO_ANSWER_AFTER_MS = 30000, SHOWN_RESTORES = 5, MINUTE_S = 60;
const given = new URLSearchParams(location.hash.slice(1));
const serverUrl = given.get("server") || "http://127.0.0.1:30000";
const colors = { device: "#7a8599", restored: "#3b7dd8", computed: "#ef8a2c" };
let chart = null;

function node(name, attributes, ...children) {
  const isSvg = ["svg", "rect", "line", "text", "title", "g"].includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

const put = (id, ...children) => document.getElementById(id).replaceChildren(...children);
const count = (number) => Math.round(number).toLocaleString("en");
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "-");

function bytes(number) {
  if (!number) return "-";
  const power = Math.min(Math.floor(Math.log2(number) / 10), 5);
  return `${(number / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

function seconds(number) {
  if (number < 60) return `${number.toFixed(1)} s`;
  return number < 3600 ? `${(number / 60).toFixed(1)} min` : `${(number / 3600).toFixed(1)} h`;
}

function table(names, rows, numTexts = 1) {
  const kind = (index) => (index < numTexts ? { class: "text" } : {});
  const line = (cells, name) => node("tr", {}, ...cells.map((cell, index) => node(name, kind(index), cell)));
  return node("table", {}, line(names, "th"), ...rows.map((row) => line(row, "td")));
}

function state(id, text, isBad) {
  const shown = document.getElementById(id);
  shown.textContent = text;
  shown.classList.toggle("bad", isBad);
}

// ---- what the daemon says ----

function drawDaemon(seen) {
  state("daemon", `daemon: up for ${seconds(seen.uptime_s)}, clients: ${seen.sessions}`, false);
  put("tiers", table(
    ["tier", "", "used", "of", "turns", "hit pages", "evicted", "to write"],
    seen.tiers.map((tier) => [
      [tier.name, ...tier.states].join(" "),
      node("meter", { max: tier.capacity_bytes || 1, value: tier.used_bytes }),
      bytes(tier.used_bytes), bytes(tier.capacity_bytes), count(tier.turns), count(tier.hit_pages),
      count(tier.evicted), bytes(tier.queued_bytes),
    ])));
  drawHits(seen.samples);
  const tiers = seen.tiers.map((tier) => tier.name);
  const rows = seen.conversations.map((each) => [
    each.first_page.slice(0, 10), each.tenant || "-", each.codecs.join(", ") || "-", count(each.tokens),
    each.turns, ...tiers.map((tier) => bytes(each.held[tier])), bytes(each.exact_copy_bytes),
    each.spent_nats === null ? "not known" : each.spent_nats.toFixed(4), each.leases, seconds(each.idle_s),
  ]);
  const names = ["first page", "tenant", "stored as", "tokens", "turns", ...tiers, "exact copies", "nats spent",
    "leases", "idle"];
  const more = seen.left_out ? [node("p", { class: "what" }, `and ${count(seen.left_out)} more`)] : [];
  const none = node("p", { class: "what" }, seen.not_listed || "none yet");
  put("conversations", ...(rows.length ? [table(names, rows, 3), ...more] : [none]));
}

function drawHits(samples) {
  // Counters fall when a daemon starts anew; its samples start anew, too.
  const rate = (from, to) => {
    const asked = to[1] - from[1] + to[2] - from[2];
    return asked ? (100 * (to[1] - from[1])) / asked : null;
  };
  let first = 0;
  const lately = samples.map((sample) => {
    while (samples[first][0] < sample[0] - MINUTE_S) first++;
    return rate(samples[first], sample);
  });
  const since = samples.map((sample) => rate([0, 0, 0], sample));
  const data = [samples.map((sample) => sample[0]), lately, since];
  if (chart) {
    chart.setData(data);
    return;
  }
  const width = Math.max(document.getElementById("hits").clientWidth, 300);
  const line = (label, stroke) => ({ label, stroke, width: 2, spanGaps: true, points: { show: false } });
  chart = new uPlot({
    width, height: 200, scales: { y: { range: [0, 101] } }, legend: { live: false },
    axes: [{ space: 90, values: (_, times) => times.map((time) => new Date(1e3 * time).toLocaleTimeString("en-GB")) }, {}],
    series: [{ label: "time" }, line("of a minute", "#3b7dd8"), line("since the start", "#7a8599")],
  }, data, document.getElementById("hits"));
}

// ---- what the server says ----

function drawServer(info) {
  const states = info.internal_states.filter((each) => each.krul);
  if (!states.length) throw new Error("it runs without krul");
  const ranks = states.map((each) => each.krul);
  const sum = (of) => ranks.reduce((total, rank) => total + of(rank), 0);
  const plans = (name) => sum((rank) => rank.restore.plans[name]);
  const exact = sum((rank) => (rank.offload.tokens * rank.offload.page_bytes) / info.page_size);
  const stored = sum((rank) => rank.offload.num_bytes);
  const hits = sum((rank) => rank.hit_pages), missed = sum((rank) => rank.missed_pages);
  const dropped = sum((rank) => Object.values(rank.offload.dropped_turns).reduce((one, other) => one + other, 0));
  const numbers = [
    [(exact / Math.max(stored, 1)).toFixed(1) + " x", `smaller: ${bytes(exact)} of KV in ${bytes(stored)}`],
    [percent(hits, hits + missed), `of ${count(hits + missed)} pages found`],
    [seconds(plans("saved_s")), "of TTFT saved, by plan"],
    [count(plans("prefix_tokens") - plans("head_tokens")), "tokens loaded, not computed"],
    [count(plans("loads")), `requests restored, ${count(sum((rank) => rank.restore.forward.rescued_requests))} failed`],
    [count(dropped), "turns not stored"],
  ];
  put("numbers", ...numbers.map(([number, what]) =>
    node("div", {}, node("div", { class: "number" }, number), node("div", { class: "what" }, what))));
  put("causes", drawCauses(states.flatMap((each) => JSON.parse(each.krul_reasons))));
  const last = states.flatMap((each) => each.krul_restores.slice(-SHOWN_RESTORES).reverse()).slice(0, SHOWN_RESTORES);
  put("restores", ...(last.length ? last.map(drawRestore) : [node("p", { class: "what" }, "none yet")]));
  const name = info.served_model_name.replace(/\/+$/, "").split("/").pop();
  state("server", `server: ${name} at ${serverUrl}`, false);
}

// The fields of RequestReasons, in order.
function tokensByCause(requests) {
  const found = new Map();
  const add = (kind, name, number) => {
    if (number > 0) found.set(name, { kind, number: (found.get(name)?.number || 0) + number });
  };
  for (const [, total, device, storeEnd, declined, loaded, , failed, salvaged, missing] of requests) {
    const loadedEnd = failed ? Math.max(salvaged, device) : loaded.length ? loaded[loaded.length - 1][1] : device;
    let end = Math.max(storeEnd, loadedEnd);
    add("device", "on the device", device);
    add("restored", "restored", loadedEnd - device);
    add("computed", failed ? "load failed" : declined || "unused", end - loadedEnd);
    for (const [, runEnd, what] of missing) {
      const why = what === "unknown" && declined === "late" ? "late" : what;
      const wholeEnd = why === "new" || why === "parted" ? total : runEnd;
      add("computed", why, wholeEnd - end);
      end = Math.max(end, wholeEnd);
    }
    add("computed", "last tokens", total - end);
  }
  return found;
}

function drawCauses(requests) {
  const found = [...tokensByCause(requests)];
  if (!found.length) return node("p", { class: "what" }, "none yet");
  const order = Object.keys(colors);
  found.sort(([, one], [, other]) => order.indexOf(one.kind) - order.indexOf(other.kind) || other.number - one.number);
  const all = found.reduce((total, [, each]) => total + each.number, 0), left = 190, width = 250, step = 22;
  const bars = found.map(([name, each], row) => node("g", {},
    node("text", { x: 0, y: row * step + 14 }, each.kind === "computed" ? `computed: ${name}` : name),
    node("rect", { x: left, y: row * step + 3, height: 14, width: Math.max(1, (width * each.number) / all),
      fill: colors[each.kind] }),
    node("text", { x: left + 6 + (width * each.number) / all, y: row * step + 14 },
      `${count(each.number)} (${percent(each.number, all)})`)));
  const size = { width: left + width + 110, height: found.length * step + 4 };
  return node("div", {}, node("svg", size, ...bars),
    node("div", { class: "what" }, `of ${count(requests.length)} prompts; krul-sglang why has each of them`));
}

function drawRestore(restore) {
  const streams = restore.streams, width = 1040, left = 60, height = 22;
  const planned = Math.max(...restore.requests.map((each) => each.planned_s));
  const parts = Object.values(streams).flat();
  const scale = width / Math.max(restore.end_s, planned, ...parts.map((part) => part[2]), 1e-9);
  const bars = (kind, name, row) => streams[name].map(([layer, begin, end]) => {
    const x = left + begin * scale, long = Math.max((end - begin) * scale, 0.5);
    const bar = node("rect", { x, y: row * (height + 4), width: long, height, class: kind },
      node("title", {}, `${kind} of layer ${layer}: ${(1e3 * begin).toFixed(2)} to ${(1e3 * end).toFixed(2)} ms`));
    if (long < 18 || kind === "wait") return bar;
    return node("g", {}, bar, node("text", { x: x + long / 2, y: row * (height + 4) + 15, class: "inside" }, layer));
  });
  const bottom = 2 * (height + 4);
  const ticks = [0, 1, 2, 3, 4].map((tick) => (tick * width) / 4);
  const notes = [
    restore.requests.length > 1 ? `${restore.requests.length} requests` : "",
    restore.is_mixed ? "beside requests with nothing to restore" : "",
    restore.was_rescued ? "the load failed, all was computed" : "",
  ].filter(Boolean);
  const tokens = restore.requests.reduce((total, each) => total + each.restored_tokens, 0);
  const heads = restore.requests.reduce((total, each) => total + each.head_ends[0] - each.device_tokens, 0);
  const tiers = [...new Set(restore.requests.flatMap((each) => each.tiers))].join(", ");
  const title = [`${count(tokens)} tokens from ${tiers} in ${(1e3 * restore.end_s).toFixed(1)} ms`,
    `planned ${(1e3 * planned).toFixed(1)} ms (dotted)`, `${count(heads)} recomputed in layer 0`, ...notes,
    restore.requests.map((each) => each.rid).join(", ").slice(0, 80)].join("; ");
  return node("div", {}, node("div", {}, title), node("svg", { width: left + width + 60, height: bottom + 18 },
    node("text", { x: 0, y: 15 }, "load"), node("text", { x: 0, y: height + 19 }, "compute"),
    ...bars("load", "load", 0), ...bars("wait", "wait", 1), ...bars("head", "head", 1), ...bars("own", "own", 1),
    node("line", { x1: left, x2: left + width, y1: bottom, y2: bottom, class: "axis" }),
    node("line", { x1: left + planned * scale, x2: left + planned * scale, y1: 0, y2: bottom, class: "planned" }),
    ...ticks.map((x) => node("text", { x: left + x, y: bottom + 13 }, `${((1e3 * x) / scale).toFixed(1)} ms`))));
}

// ---- asking ----

async function ask(url, token) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(url, { headers, signal: AbortSignal.timeout(NO_ANSWER_AFTER_MS) });
  if (!reply.ok) throw new Error(`it answers ${reply.status}${reply.status === 401 ? ": a token is missing or wrong" : ""}`);
  return reply.json();
}

// The next question comes after the answer to the last one; a page that nobody sees asks nothing.
async function askAgain(id, url, token, draw) {
  for (let since = null; ; await new Promise((done) => setTimeout(done, ASK_EVERY_MS))) {
    if (document.hidden) continue;
    try {
      draw(await ask(url, token));
      since = null;
    } catch (error) {
      since = since || new Date().toLocaleTimeString();
      state(id, `${id}: no answer since ${since} (${error.message})`, true);
    }
  }
}

askAgain("daemon", "/v1/status", given.get("token"), drawDaemon);
askAgain("server", `${serverUrl.replace(/\/+$/, "")}/server_info`, given.get("key"), drawServer);
