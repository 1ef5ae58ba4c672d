// The page of weft explain: a panel for each layout and schedule, with matrix, work, bytes and timeline.
let page, view, scale;

function showPair(matrix, spoken) {
  const box = matrix.canvas.getBoundingClientRect(), [x, y] = matrix.point(...view.cross);
  showTip(pairLines(matrix.panel, view.cross), box.left + x, box.top + y, spoken);
}

function clearCross() {
  hideTip();
  if (view.cross) view.clearCross();
}

function addPanel(panel) {
  const { name, note, ranks, steps, slicesTotal, times } = panel;
  const matrix = element("canvas", { class: "matrix", tabindex: "0", role: "application", "aria-label":
      `Matrix of queries by keys, ${name}. Arrows move a cross and read the cell, plus and minus zoom, 0 shows all.` });
  const chart = timelineCanvas(`${name}, ${times.about}`);
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
  listenTo(panel.matrix, showPair, clearCross);
  listenToTimeline(panel.chart);
}

// Timelines of one pass, all on one scale.
function showPass(pass) {
  const end = most(page.panels.map((panel) => panel.times[pass].end));
  for (const { chart, times, timed, ranks } of page.panels) {
    const of = times[pass], efficiency = `${(100 * of.ideal / of.end).toFixed(0)} % efficiency`;
    const some = of.ranks.length < ranks ? `, ${of.ranks.length} of ${ranks} ranks` : "";
    chart.show(pass, end);
    timed.textContent = of.end > 0 ? `${times.about}: ${duration(of.end)}, ${efficiency}${some}` : times.about;
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
// Panels outside the window are drawn when they scroll into it.
function draw(quick, all = false) {
  const ratio = state.printing ? 3 : Math.min(devicePixelRatio || 1, 3);
  for (const panel of page.panels) {
    const { top, bottom } = panel.matrix.canvas.getBoundingClientRect();
    panel.stale = !all && (bottom < 0 || top > innerHeight);
    if (!panel.stale) panel.matrix.draw(state.theme, state.mode, state.chosen, ratio, quick);
  }
}
// Draws in the next frame at one sample a CSS pixel, and at full resolution 120 ms after the last change.
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

function setColours() {
  for (const panel of page.panels) panel.bars.replaceChildren(drawBars(panel, state.theme, scale));
  drawKey();
  layOut();
}

function startExplain() {
  page = readPage(data);
  view = new View(page.q.tokens, page.k.tokens);
  scale = { work: most(page.panels.map((p) => most(p.work))),
            bytes: most(page.panels.map((p) => most(p.bytesIn.map((v, r) => v + p.backwardIn[r])))) };
  Object.assign(state, { mode: page.mode, chosen: -1 });
  const about = [counted(page.pairs, "visible pair"),
                 `heads ${page.heads.join(":")}, dim ${page.dims.join(":")}, ${page.dtype}`];
  const words = [...(page.title ? [page.words] : []), ...about, ...page.notes].join("; ");
  byId("panels").classList.toggle("single", page.panels.length === 1);
  addChoices(byId("modes"), "mode", MODES, state.mode, choose);
  page.panels.forEach((panel) => addPanel(panel));
  showPass(state.pass);
  byId("in").addEventListener("click", () => view.zoom(0.6));
  byId("out").addEventListener("click", () => view.zoom(1 / 0.6));
  byId("fit").addEventListener("click", () => view.fit());
  document.addEventListener("keydown", (event) => {
    if (isShortcut(event) && event.key >= "1" && event.key <= "3") choose(MODES[Number(event.key) - 1][0]);
  });
  addEventListener("scroll", () => page.panels.some((panel) => panel.stale) && redraw(), { passive: true });
  view.listeners.push(redraw);
  startShell({ title: page.title || page.words, words, ranks: page.ranks, steps: page.steps,
               passes: ["forward", "backward"], showPass, setColours, layOut });
  return { page, view, state, pairLines };
}
