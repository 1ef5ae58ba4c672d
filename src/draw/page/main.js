// Puts the page together. All text reaches it as text, never as HTML.
const page = readPage(JSON.parse(document.getElementById("data").textContent));
const view = new View(page.q.tokens, page.k.tokens);
const byId = (id) => document.getElementById(id);
const tip = byId("tip"), said = byId("said");
const state = { mode: page.mode, chosen: -1, pass: "forward", theme: null, printing: false };
const scale = { work: most(page.panels.map((p) => most(p.work))),
                bytes: most(page.panels.map((p) => most(p.bytesIn.map((v, r) => v + p.backwardIn[r])))) };

const isDark = () => !state.printing && (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

// What is known of a pair, as lines of the tip.
function pairLines(panel, [q, k]) {
  const found = panel.describe(q, k);
  const end = ({ token, document, position, padding, rank, row }) => [
    `token ${grouped(token)}`, document < 0 ? "in no document" : `document ${document}, ${padding ? "padding" : `position ${grouped(position)}`}`,
    rank < 0 ? "on no rank" : `rank ${rank}, row ${grouped(row)}`].join(" · ");
  const lines = [["Query", end(found.query)], ["Key", end(found.key)]];
  if (!found.visible) {
    const apart = found.query.document !== found.key.document;
    return [...lines, ["Visible", found.query.padding || found.key.padding ? "no: padding" : apart ? "no: another document" : "no: outside the mask"]];
  }
  const first = Math.floor(found.query.rank / panel.inside) * panel.inside;
  const who = panel.inside > 1 ? `ranks ${first} to ${first + panel.inside - 1}, each for its heads` : `rank ${found.query.rank}`;
  const when = panel.headSteps > 1 ? `steps ${found.step} to ${found.step + panel.headSteps - 1}, a group of heads each` : `step ${found.step} of ${panel.steps}`;
  const from = found.query.rank === found.key.rank ? "the key is its own" : `the key comes from rank ${found.key.rank}`;
  lines.push(["Attended", `by ${who} in ${when}; ${panel.inside > 1 ? "" : from}`.replace(/; $/, "")]);
  if (found.slice) {
    const { number, of, q: rows, k: keys, lo, hi } = found.slice;
    const band = [lo > -page.far ? `${grouped(lo)} ≤ ` : "", "k − q", hi < page.far ? ` ≤ ${grouped(hi)}` : ""].join("");
    lines.push(["Slice", `${number} of ${of}: q [${grouped(rows[0])}, ${grouped(rows[1])}), k [${grouped(keys[0])}, ${grouped(keys[1])})` +
        (lo > -page.far || hi < page.far ? `, ${band}` : ", every pair")]);
  } else if (!panel.slices) {
    lines.push(["Slice", `not listed: ${grouped(panel.slicesTotal)} slices do not fit the page`]);
  }
  return lines;
}

function showTip(lines, x, y, spoken) {
  tip.replaceChildren(element("dl", {}, ...lines.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })])));
  tip.hidden = false;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(6, x + 18 + wide > innerWidth ? x - wide - 14 : x + 18)}px`;
  tip.style.top = `${Math.max(6, y + 18 + high > innerHeight ? y - high - 14 : y + 18)}px`;
  if (spoken) said.textContent = lines.map(([name, text]) => `${name}: ${text}`).join(". ");
}

function hideTip() {
  tip.hidden = true;
}

function showPair(matrix, spoken) {
  const box = matrix.canvas.getBoundingClientRect(), [x, y] = matrix.point(...view.cross);
  showTip(pairLines(matrix.panel, view.cross), box.left + x, box.top + y, spoken);
}

function forget() {
  hideTip();
  if (view.cross) view.forget();
}

function addPanel(panel) {
  const help = `Matrix of queries by keys, ${panel.name}. Arrows move a cross and read the cell, plus and minus zoom, 0 shows all.`;
  const canvas = element("canvas", { class: "matrix", tabindex: "0", role: "application", "aria-label": help });
  const time = element("canvas", { class: "timeline", tabindex: "0", role: "application",
                                   "aria-label": `Timeline, ${panel.name}, ${panel.times.about}. Arrows go from event to event.` });
  const numbers = element("div", { class: "numbers" });
  const section = element("section", { class: "panel", "aria-label": panel.name },
                          element("header", {}, element("h2", { text: panel.name }),
                                  element("span", { class: "about", text: `${counted(panel.ranks, "rank")}, ${counted(panel.steps, "step")}, ${counted(panel.slicesTotal, "slice")}` })),
                          ...(panel.note ? [element("p", { class: "about note", text: panel.note })] : []),
                          element("div", { class: "sides" }, element("div", {}, canvas), numbers));
  byId("panels").append(section);
  panel.matrix = new Matrix(panel, view, canvas);
  panel.chart = new TimelineChart(panel, time);
  panel.bars = element("div");
  panel.timed = element("small");
  numbers.append(panel.bars, element("div", {}, element("h3", { text: "Timeline " }, panel.timed), time,
                                     element("p", { class: "about legend", text: "a lane a rank, coloured by step: above it computes, below it exchanges; grey: passes over rows, swaps of heads" })),
                 numbersTable(panel));
  listenTo(panel.matrix, showPair, forget);
  listenToTimeline(panel.chart);
}

function listenToTimeline(chart) {
  const { canvas } = chart;
  const show = (found, spoken) => {
    chart.chosen = found;
    chart.draw(state.theme, devicePixelRatio);
    if (!found) return hideTip();
    const box = canvas.getBoundingClientRect(), [x, y, wide] = chart.box(found[0], chart.lines[found[0]].events[found[1]]);
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
  for (const panel of page.panels) {
    const { chart, times } = panel, of = times[pass], some = of.ranks.length < panel.ranks ? `, ${of.ranks.length} of ${panel.ranks} ranks` : "";
    chart.show(pass, end);
    panel.timed.textContent = of.end > 0 ? `${times.about}: ${duration(of.end)}, ${(100 * of.ideal / of.end).toFixed(0)} % of the ideal${some}` : times.about;
  }
}

const MODES = [["query", "query's rank"], ["key", "key's rank"], ["step", "step"]];

function choose(mode, chosen = -1) {
  Object.assign(state, { mode, chosen });
  for (const input of document.querySelectorAll("#modes input")) input.checked = input.value === mode;
  drawKey();
  redraw();
}

// The legend: a button for each rank or step, or a ramp where there are many.
function drawKey() {
  const key = byId("key"), theme = state.theme, steps = state.mode === "step";
  const count = steps ? page.steps : page.ranks, colours = steps ? theme.steps : theme.ranks, word = steps ? "step" : "rank";
  key.replaceChildren();
  if (count <= 16) {
    for (let i = 0; i < count; ++i) {
      const swatch = element("i");
      swatch.style.background = css(colours[i]);
      const button = element("button", { type: "button", "aria-pressed": String(state.chosen === i), "aria-label": `Bring out ${word} ${i}` },
                             swatch, document.createTextNode(i === 0 ? `${word} 0` : String(i)));
      button.addEventListener("click", () => {
        choose(state.mode, state.chosen === i ? -1 : i);
        key.querySelectorAll("button")[i].focus();
      });
      key.append(button);
    }
  } else {
    const bar = element("i", { class: "ramp" });
    bar.style.background = `linear-gradient(90deg, ${colours.filter((_, i) => i % Math.ceil(count / 24) === 0).map(css).join(",")})`;
    const input = element("input", { type: "number", min: "0", max: String(count - 1), placeholder: `one ${word}`, "aria-label": `Bring out one ${word}` });
    if (state.chosen >= 0) input.value = String(state.chosen);
    input.addEventListener("change", () => {
      const value = input.value === "" ? -1 : Math.min(Math.max(Math.floor(Number(input.value)), 0), count - 1);
      state.chosen = Number.isNaN(value) ? -1 : value;
      redraw();
    });
    key.append(element("span", { text: `${word} 0` }), bar, element("span", { text: String(count - 1) }), input);
  }
  if (!steps) key.append(element("span", { text: "pale: key on another rank" }));
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
  if (!waiting) waiting = requestAnimationFrame(() => {
    waiting = 0;
    draw(true);
    clearTimeout(later);
    later = setTimeout(() => draw(false), 120);
  });
}

function layOut() {
  for (const panel of page.panels) {
    panel.matrix.resize();
    panel.chart.resize();
    panel.chart.draw(state.theme, state.printing ? 3 : devicePixelRatio || 1);
  }
  draw(false, true);
}

function setTheme() {
  state.theme = makeTheme(page.palettes, isDark(), page.ranks, page.steps);
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  for (const panel of page.panels) panel.bars.replaceChildren(drawBars(panel, state.theme, scale));
  drawKey();
  layOut();
}

function start() {
  byId("title").textContent = page.title || page.words;
  byId("words").textContent = `${page.title ? `${page.words}; ` : ""}${counted(page.pairs, "visible pair")}; heads ${page.heads.join(":")}, dim ${page.dims.join(":")}, ${page.dtype}`;
  byId("command").textContent = page.command;
  byId("made").textContent = `Weft ${page.version}`;
  byId("panels").classList.toggle("single", page.panels.length === 1);
  for (const [value, text] of MODES) {
    const input = element("input", { type: "radio", name: "mode", value });
    input.checked = value === state.mode;
    input.addEventListener("change", () => choose(value));
    byId("modes").append(element("label", {}, input, document.createTextNode(text)));
  }
  for (const value of ["forward", "backward"]) {
    const input = element("input", { type: "radio", name: "pass", value });
    input.checked = value === state.pass;
    input.addEventListener("change", () => {
      choosePass(value);
      layOut();
    });
    byId("passes").append(element("label", {}, input, document.createTextNode(value)));
  }
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
  // On paper all is light.
  let before;
  const printing = (now) => () => {
    const root = document.documentElement.dataset;
    if (now) before = root.theme;
    state.printing = now;
    document.documentElement.classList.toggle("paper", now);
    if (now) root.theme = "light";
    else if (before) root.theme = before;
    else delete root.theme;
    setTheme();
  };
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
  addEventListener("scroll", () => page.panels.some((panel) => panel.stale) && redraw(), { passive: true });
  new ResizeObserver(layOut).observe(byId("panels"));
  view.listeners.push(redraw);
  setTheme();
}

start();
window.weft = { page, view, state, pairLines };
