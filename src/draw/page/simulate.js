// The page of weft simulate: where the time goes, efficiency, tokens and memory over ranks; then for each problem a heat
// map, numbers and timelines of its lines.
const percent = (fraction) => `${(100 * fraction).toFixed(0)} %`;
const milliseconds = (seconds) => (seconds === null ? "-" : (1e3 * seconds).toFixed(3));

function svgElement(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function groupedBy(list, key) {
  const groups = new Map();
  for (const item of list) groups.set(key(item), [...(groups.get(key(item)) || []), item]);
  return [...groups];
}

// A number of the lines over ranks, a curve for each schedule and layout that was asked for. `least`: the smallest step
// between ticks.
function curves(lines, theme, { title, value, tick, least }) {
  const ranks = [...new Set(lines.map((line) => line.ranks))].sort((a, b) => a - b);
  const left = 60, top = 10, wide = 380, high = 190;
  const best = most(lines.map(value));
  const step = Math.max(least, roundStep(best / 5)), steps = Math.max(1, Math.ceil(best / step - 1e-6));
  const x = (rank) => left + (wide * ranks.indexOf(rank)) / (ranks.length - 1);
  const y = (number) => top + high * (1 - number / (step * steps));
  const plot = svgElement("svg", { viewBox: "0 0 460 230", role: "img", "aria-label": `${title} over ranks` });
  const label = (text, at) => {
    const made = svgElement("text", at);
    made.textContent = text;
    plot.append(made);
  };
  for (let n = 0; n <= steps; ++n) {
    plot.append(svgElement("line", { x1: left, x2: left + wide, y1: y(n * step), y2: y(n * step) }));
    label(tick(n * step), { class: "tick", x: left - 6, y: y(n * step) + 4, "text-anchor": "end" });
  }
  for (const rank of ranks) label(String(rank), { x: x(rank), y: top + high + 18, "text-anchor": "middle" });
  groupedBy(lines, (line) => line.asked).forEach(([, of], n) => {
    const points = of.map((l) => `${x(l.ranks)},${y(value(l))}`).join(" ");
    plot.append(svgElement("polyline", { ...strokeOf(n, theme), points }));
  });
  return element("div", {}, element("h3", { text: title }), plot);
}

// Past the colours, the same ones in dashes.
function strokeOf(n, theme) {
  const dash = Math.floor(n / theme.ranks.length);
  return { stroke: css(theme.ranks[n % theme.ranks.length]), "stroke-dasharray": dash ? `${2 + 4 * dash} 3` : "none" };
}

function curvesLegend(lines, theme) {
  const names = groupedBy(lines, (line) => line.asked).map(([name], n) => {
    const sample = svgElement("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" },
                              svgElement("path", { ...strokeOf(n, theme), class: "sample", d: "M0 4H28" }));
    return element("li", {}, sample, document.createTextNode(name));
  });
  return element("ul", {}, ...names);
}

const share = (line) => line.memory / data.memory;
const CURVES = [
  { title: "Efficiency", value: (line) => line.efficiency, tick: percent, least: 0.01 },
  { title: "Tokens a second and GPU", value: (line) => line.tokensPerSecond, tick: short, least: 1e-9 },
  ...(data.memory > 0 ? [{ title: `Memory, of the GPU's ${bytes(data.memory)}`, value: share, tick: percent, least: 0.01 }] : []),
];

// Bars of each line's time in parts, all on one scale, by the number of ranks.
const PARTS = [["compute", 0], ["imbalance", 1], ["exposed communication", 4]];
function partBars(lines, theme) {
  const box = element("div", { class: "loads times" }), scale = most(lines.map((l) => l.forward + l.backward));
  for (const [ranks, of] of groupedBy(lines, (line) => line.ranks)) {
    box.append(element("span", { class: "head across", text: counted(ranks, "rank") }));
    for (const { name, forward, backward, efficiency, parts } of of) {
      const bar = track(parts.map((value, i) => [value, css(theme.ranks[PARTS[i][1]])]), scale);
      bar.title = bar.ariaLabel = PARTS.map(([word], i) => `${word} ${milliseconds(parts[i])} ms`).join(", ");
      bar.role = "img";
      bar.removeAttribute("aria-hidden");
      const words = `${milliseconds(forward + backward)} ms, ${percent(efficiency)} efficiency`;
      box.append(element("span", { text: name }), bar, element("span", { class: "value", text: words }));
    }
  }
  const legend = PARTS.map(([word, colour]) => {
    const swatch = element("i");
    swatch.style.background = css(theme.ranks[colour]);
    return element("span", {}, swatch, document.createTextNode(word));
  });
  return element("div", {}, element("div", { class: "swatches" }, ...legend), box);
}

// Times of all schedules by layouts, the darker the faster; null if there is only one of either. Choices of auto are no
// point of the grid.
function heatMap(lines, theme) {
  const fixed = lines.filter((line) => !line.chosen), of = (key) => [...new Set(fixed.map((line) => line[key]))];
  const schedules = of("schedule"), layouts = of("layout");
  if (schedules.length < 2 || layouts.length < 2) return null;
  const seconds = (line) => line.forward + line.backward;
  const best = least(fixed.filter((line) => line.refused === undefined).map(seconds));
  const cell = (schedule, layout) => {
    const line = fixed.find((l) => l.schedule === schedule && l.layout === layout);
    if (!line || line.refused !== undefined) return element("td", { text: "-", title: line ? line.refused : "not asked for" });
    const colour = mix(theme.accent, theme.empty, Math.min(Math.log2(seconds(line) / best) / 1.5, 0.92));
    const made = element("td", { text: milliseconds(seconds(line)), title: `${(seconds(line) / best).toFixed(2)} times the fastest` });
    made.style.background = css(colour);
    made.style.color = onTop(colour);
    return made;
  };
  const head = ["ms, both passes", ...layouts].map((text) => element("th", { text, scope: "col" }));
  const body = schedules.map((schedule) => element("tr", {}, element("th", { text: schedule, scope: "row" }),
                                                   ...layouts.map((layout) => cell(schedule, layout))));
  return element("table", { class: "heat" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

const COLUMNS = ["schedule, layout", "forward ms", "backward ms", "efficiency", "overlapped", "imbalance", "MiB in",
                 "memory", "tokens/s/GPU"];
const COLUMN_WORDS = "Efficiency: ideal time over time. Overlapped: part of all " +
    "exchange time that lies under computes. Imbalance: longest compute over the mean. MiB in: of the rank that " +
    "receives most, in both passes. Memory: of the rank that needs most, and its share of the GPU's. Tokens/s/GPU: through this " +
    "attention, both passes.";

function linesTable(lines) {
  return table(COLUMNS, lines.map((l) => [
    l.name, milliseconds(l.forward), milliseconds(l.backward), percent(l.efficiency),
    l.overlapped === null ? "-" : percent(l.overlapped), l.imbalance.toFixed(2), (l.bytesIn / 2 ** 20).toFixed(1),
    data.memory > 0 ? `${bytes(l.memory)} (${percent(share(l))})` : bytes(l.memory), grouped(l.tokensPerSecond)]));
}

// The timelines of a line, of rank 0 and of the rank with most pairs; null if the page leaves them out.
function lineTimeline(line, section) {
  const read = (times) => (times ? readTimeline(times) : { end: 0, ranks: [] });
  if (!line.times.forward && !line.times.backward) return null;
  const times = { forward: read(line.times.forward), backward: read(line.times.backward) };
  const canvas = timelineCanvas(line.name), cut = element("p", { class: "about cut" });
  section.append(element("h3", { text: line.name }), canvas, cut);
  const chart = new TimelineChart({ times, page: { heads: [line.heads] } }, canvas);
  listenToTimeline(chart);
  return { chart, times, cut };
}

function addProblem(name, all) {
  const lines = all.filter((line) => line.refused === undefined);
  const section = element("section", { class: "panel", "aria-label": name }, element("h2", { text: name }));
  const heat = element("div", { class: "scroll" });
  section.append(heat, element("div", { class: "scroll" }, linesTable(lines)),
                 element("p", { class: "about", text: COLUMN_WORDS }));
  const charts = [];
  for (const line of lines) {
    const timeline = lineTimeline(line, section);
    if (timeline) charts.push(timeline);
    if (line.why) section.append(element("p", { class: "about why", text: line.why }));
  }
  if (charts.length) section.append(element("p", { class: "about", text: `${LANES}; of rank 0 and the rank with most pairs` }));
  byId("panels").append(section);
  return { all, heat, charts };
}

function startSimulate() {
  for (const control of document.querySelectorAll(".of-matrix")) control.remove();
  byId("panels").classList.add("single");
  const timed = data.lines.filter((line) => line.refused === undefined), plots = [];
  for (const [name, lines] of groupedBy(timed, (line) => line.sweep)) {
    const plot = element("div");
    byId("panels").append(element("section", { class: "panel" }, element("h2", { text: "Where the time goes" }),
                                  element("p", { class: "about", text: name }), plot));
    plots.push({ lines, plot });
  }
  const problems = groupedBy(data.lines, (line) => line.problem)
      .filter(([, lines]) => lines.some((line) => line.refused === undefined)).map(([name, lines]) => addProblem(name, lines));
  for (const { name, ranks, refused } of data.lines.filter((line) => line.refused))
    byId("panels").append(element("p", { class: "refused", text: `${name}, ${counted(ranks, "rank")}: ${refused}` }));
  const charts = problems.flatMap((problem) => problem.charts);
  const showPass = (pass) => {
    for (const problem of problems) {
      const end = most(problem.charts.map(({ times }) => times[pass].end));
      for (const { chart, times, cut } of problem.charts) {
        chart.show(pass, end);
        const left = times[pass].ranks.filter(({ total, events }) => events.length < total);
        cut.textContent = left.map(({ rank, total, events }) =>
            `rank ${rank}: the first ${events.length} of ${total} events`).join("; ");
      }
    }
  };
  const layOut = () => {
    for (const { chart } of charts) {
      chart.resize();
      chart.draw(state.theme, state.printing ? 3 : devicePixelRatio || 1);
    }
  };
  const setColours = () => {
    for (const { lines, plot } of plots) {
      const many = new Set(lines.map((line) => line.ranks)).size > 1;
      const drawn = many ? [...CURVES.map((of) => curves(lines, state.theme, of)), curvesLegend(lines, state.theme)] : [];
      plot.replaceChildren(partBars(lines, state.theme), element("div", { class: "curves" }, ...drawn));
    }
    for (const { all, heat } of problems) heat.replaceChildren(...[heatMap(all, state.theme)].filter((made) => made));
    layOut();
  };
  const passes = ["forward", "backward"].filter((pass) => timed.some((line) => line[pass] !== null));
  const steps = charts.flatMap(({ times }) => passes.flatMap((pass) => times[pass].ranks))
      .flatMap(({ events }) => events.map(([, , step]) => step + 1));
  state.pass = passes[0] || "forward";
  showPass(state.pass);
  startShell({ title: data.title, words: [data.words, data.heading, ...data.notes].join("; "), ranks: 8,
               steps: most(steps), passes, showPass, setColours, layOut });
  return { data, state, charts };
}
