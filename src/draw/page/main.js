// Puts the page together. All text reaches it as text, never as HTML.
const page = readPage(JSON.parse(document.getElementById("data").textContent));
const view = new View(page.q.tokens, page.k.tokens);
const byId = (id) => document.getElementById(id);
const state = { mode: page.mode, chosen: -1, pass: "forward", theme: null, printing: false };
const scale = { work: most(page.panels.map((p) => most(p.work))),
                bytes: most(page.panels.map((p) => most(p.bytesIn.map((v, r) => v + p.backwardIn[r])))) };

const isDark = () => !state.printing && (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function showPair(matrix, spoken) {
  const box = matrix.canvas.getBoundingClientRect(), [x, y] = matrix.point(...view.cross);
  showTip(pairLines(matrix.panel, view.cross), box.left + x, box.top + y, spoken);
}

function forget() {
  hideTip();
  if (view.cross) view.forget();
}

const LANES = "a lane a rank, coloured by step: above it computes, below it exchanges; grey: passes over rows, swaps of " +
    "heads";

function addPanel(panel) {
  const { name, note, ranks, steps, slicesTotal, times } = panel;
  const canvas = (kind, words) =>
      element("canvas", { class: kind, tabindex: "0", role: "application", "aria-label": words });
  const matrix = canvas("matrix", `Matrix of queries by keys, ${name}. Arrows move a cross and read the cell, plus ` +
      "and minus zoom, 0 shows all.");
  const chart = canvas("timeline", `Timeline, ${name}, ${times.about}. Arrows go from event to event.`);
  const counts = [counted(ranks, "rank"), counted(steps, "step"), counted(slicesTotal, "slice")].join(", ");
  panel.bars = element("div");
  panel.timed = element("small");
  const timeline = element("div", {}, element("h3", { text: "Timeline " }, panel.timed), chart,
                           element("p", { class: "about", text: LANES }));
  const numbers = element("div", { class: "numbers" }, panel.bars, timeline, numbersTable(panel));
  const heading = element("header", {}, element("h2", { text: name }),
                          element("span", { class: "about", text: counts }));
  byId("panels").append(element("section", { class: "panel", "aria-label": name }, heading,
                                ...(note ? [element("p", { class: "about note", text: note })] : []),
                                element("div", { class: "sides" }, element("div", {}, matrix), numbers)));
  panel.matrix = new Matrix(panel, view, matrix);
  panel.chart = new TimelineChart(panel, chart);
  listenTo(panel.matrix, showPair, forget);
  listenToTimeline(panel.chart);
}

function listenToTimeline(chart) {
  const { canvas } = chart;
  const show = (found, spoken) => {
    chart.chosen = found;
    chart.draw(state.theme, devicePixelRatio);
    if (!found) return hideTip();
    const [line, event] = found, [x, y, wide] = chart.box(line, chart.lines[line].events[event]);
    const box = canvas.getBoundingClientRect();
    showTip(chart.words(found), box.left + x + Math.min(wide / 2, 60), box.top + y + 10, spoken);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    show(chart.find(event.clientX - box.left, event.clientY - box.top), false);
  });
  canvas.addEventListener("pointerleave", () => show(null, false));
  canvas.addEventListener("blur", () => show(null, false));
  canvas.addEventListener("keydown", (event) => {
    const found = chart.step(event.key);
    if (event.key === "Escape") show(null, false);
    if (!found) return;
    event.preventDefault();
    show(found, true);
  });
}

// Timelines of one pass, all on one scale.
function choosePass(pass) {
  state.pass = pass;
  const end = most(page.panels.map((panel) => panel.times[pass].end));
  for (const { chart, times, timed, ranks } of page.panels) {
    const of = times[pass], share = `${(100 * of.ideal / of.end).toFixed(0)} % of the ideal`;
    const some = of.ranks.length < ranks ? `, ${of.ranks.length} of ${ranks} ranks` : "";
    chart.show(pass, end);
    timed.textContent = of.end > 0 ? `${times.about}: ${duration(of.end)}, ${share}${some}` : times.about;
  }
}

const MODES = [["query", "query's rank"], ["key", "key's rank"], ["step", "step"]];

function choose(mode) {
  Object.assign(state, { mode, chosen: -1 });
  for (const input of document.querySelectorAll("#modes input")) input.checked = input.value === mode;
  drawKey();
  redraw();
}

function drawKey() {
  const { theme, mode, chosen } = state, steps = mode === "step";
  const legend = steps ? { word: "step", colours: theme.steps, chosen }
      : { word: "rank", colours: theme.ranks.slice(0, page.ranks), chosen, note: "pale: key on another rank" };
  drawLegend(byId("key"), legend, (n) => {
    state.chosen = n;
    redraw();
  });
}

let waiting = 0, later = 0;
// Panels out of sight are drawn when they come into it.
function draw(quick, all = false) {
  const ratio = state.printing ? 3 : Math.min(devicePixelRatio || 1, 3);
  for (const panel of page.panels) {
    const { top, bottom } = panel.matrix.canvas.getBoundingClientRect();
    panel.stale = !all && (bottom < 0 || top > innerHeight);
    if (!panel.stale) panel.matrix.draw(state.theme, state.mode, state.chosen, ratio, quick);
  }
}
// In the next frame, coarse where pixels are fine; sharp as soon as nothing moves any more.
function redraw() {
  state.sharp = false;
  if (!waiting) waiting = requestAnimationFrame(() => {
    waiting = 0;
    draw(true);
    clearTimeout(later);
    later = setTimeout(() => {
      draw(false);
      state.sharp = true;
    }, 120);
  });
}

function layOut() {
  for (const panel of page.panels) {
    panel.matrix.resize();
    panel.chart.resize();
    panel.chart.draw(state.theme, state.printing ? 3 : devicePixelRatio || 1);
  }
  draw(false, true);
  state.sharp = !waiting;
}

function setTheme() {
  state.theme = makeTheme(page.palettes, isDark(), page.ranks, page.steps);
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  for (const panel of page.panels) panel.bars.replaceChildren(drawBars(panel, state.theme, scale));
  drawKey();
  layOut();
}

// Radio buttons: [value, words] each.
function addChoices(box, name, choices, now, choose) {
  for (const [value, words] of choices) {
    const input = element("input", { type: "radio", name, value });
    input.checked = value === now;
    input.addEventListener("change", () => choose(value));
    box.append(element("label", {}, input, document.createTextNode(words)));
  }
}

// On paper all is light, and as wide as the sheet.
function listenToPrinter() {
  const root = document.documentElement;
  let before;
  const printing = (now) => () => {
    if (now) before = root.dataset.theme;
    state.printing = now;
    root.classList.toggle("paper", now);
    if (now) root.dataset.theme = "light";
    else if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    setTheme();
  };
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
}

function start() {
  const about = [counted(page.pairs, "visible pair"),
                 `heads ${page.heads.join(":")}, dim ${page.dims.join(":")}, ${page.dtype}`];
  byId("title").textContent = page.title || page.words;
  byId("words").textContent = [...(page.title ? [page.words] : []), ...about, ...page.notes].join("; ");
  byId("command").textContent = page.command;
  byId("made").textContent = `Weft ${page.version}`;
  byId("panels").classList.toggle("single", page.panels.length === 1);
  addChoices(byId("modes"), "mode", MODES, state.mode, choose);
  addChoices(byId("passes"), "pass", [["forward", "forward"], ["backward", "backward"]], state.pass, (pass) => {
    choosePass(pass);
    layOut();
  });
  page.panels.forEach((panel) => addPanel(panel));
  choosePass("forward");
  byId("in").addEventListener("click", () => view.zoom(0.6));
  byId("out").addEventListener("click", () => view.zoom(1 / 0.6));
  byId("fit").addEventListener("click", () => view.fit());
  const turn = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    setTheme();
  };
  byId("theme").addEventListener("click", turn);
  const help = () => {
    byId("keys").hidden = !byId("keys").hidden;
    byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
  };
  byId("help").addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input[type=number]")) return;
    if (event.key >= "1" && event.key <= "3") choose(MODES[Number(event.key) - 1][0]);
    else if (event.key === "t") turn();
    else if (event.key === "?") help();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
  listenToPrinter();
  addEventListener("scroll", () => page.panels.some((panel) => panel.stale) && redraw(), { passive: true });
  new ResizeObserver(layOut).observe(byId("panels"));
  view.listeners.push(redraw);
  setTheme();
}

start();
window.weft = { page, view, state, pairLines };
