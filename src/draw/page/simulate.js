// The page of weft simulate: efficiency over ranks, then for each problem times, numbers and timelines of its lines.
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

// Efficiency over ranks, a curve for each schedule and layout that was asked for.
function efficiencyCurves(lines, theme) {
  const ranks = [...new Set(lines.map((line) => line.ranks))].sort((a, b) => a - b);
  const left = 46, top = 10, wide = 570, high = 250;
  const best = most(lines.map((line) => line.efficiency));
  const step = Math.max(0.01, roundStep(best / 5)), steps = Math.max(1, Math.ceil(best / step - 1e-6));
  const x = (rank) => left + (wide * ranks.indexOf(rank)) / (ranks.length - 1);
  const y = (efficiency) => top + high * (1 - efficiency / (step * steps));
  const plot = svgElement("svg", { viewBox: "0 0 640 290", role: "img", "aria-label": "Efficiency over ranks" });
  const label = (text, at) => {
    const made = svgElement("text", at);
    made.textContent = text;
    plot.append(made);
  };
  for (let n = 0; n <= steps; ++n) {
    plot.append(svgElement("line", { x1: left, x2: left + wide, y1: y(n * step), y2: y(n * step) }));
    label(percent(n * step), { class: "tick", x: left - 6, y: y(n * step) + 4, "text-anchor": "end" });
  }
  for (const rank of ranks) label(String(rank), { x: x(rank), y: top + high + 18, "text-anchor": "middle" });
  const legend = element("ul");
  groupedBy(lines, (line) => line.asked).forEach(([name, of], n) => {
    const colours = theme.ranks.length, dash = Math.floor(n / colours);  // past the colours, the same ones in dashes
    const stroke = { stroke: css(theme.ranks[n % colours]), "stroke-dasharray": dash ? `${2 + 4 * dash} 3` : "none" };
    plot.append(svgElement("polyline", { ...stroke, points: of.map((l) => `${x(l.ranks)},${y(l.efficiency)}`).join(" ") }));
    const sample = svgElement("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" },
                              svgElement("path", { ...stroke, class: "sample", d: "M0 4H28" }));
    legend.append(element("li", {}, sample, document.createTextNode(name)));
  });
  return element("div", { class: "curves" }, plot, legend);
}

function timeBars(lines, theme) {
  const box = element("div", { class: "loads times" }), scale = most(lines.map((l) => l.forward + l.backward));
  for (const { name, forward, backward, efficiency } of lines) {
    const words = `${milliseconds(forward + backward)} ms, ${percent(efficiency)} efficiency`;
    box.append(element("span", { text: name }),
               track([[forward, css(theme.ranks[0])], [backward, css(theme.pale[0])]], scale),
               element("span", { class: "value", text: words }));
  }
  return box;
}

const COLUMNS = ["schedule, layout", "forward ms", "backward ms", "efficiency", "overlapped", "imbalance", "MiB in",
                 "memory"];
const COLUMN_WORDS = "Bars: forward solid, backward pale. Efficiency: ideal time over time. Overlapped: part of all " +
    "exchange time that lies under computes. Imbalance: longest compute over the mean. MiB in: of the rank that " +
    "receives most, in both passes.";

function linesTable(lines) {
  return table(COLUMNS, lines.map((l) => [
    l.name, milliseconds(l.forward), milliseconds(l.backward), percent(l.efficiency),
    l.overlapped === null ? "-" : percent(l.overlapped), l.imbalance.toFixed(2), (l.bytesIn / 2 ** 20).toFixed(1),
    bytes(l.memory)]));
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

function addProblem(name, lines) {
  const section = element("section", { class: "panel", "aria-label": name }, element("h2", { text: name }));
  const bars = element("div");
  section.append(bars, element("div", { class: "scroll" }, linesTable(lines)),
                 element("p", { class: "about", text: COLUMN_WORDS }));
  const charts = [];
  for (const line of lines) {
    const timeline = lineTimeline(line, section);
    if (timeline) charts.push(timeline);
    if (line.why) section.append(element("p", { class: "about why", text: line.why }));
  }
  if (charts.length) section.append(element("p", { class: "about", text: `${LANES}; of rank 0 and the rank with most pairs` }));
  byId("panels").append(section);
  return { lines, bars, charts };
}

function startSimulate() {
  for (const control of document.querySelectorAll(".of-matrix")) control.remove();
  byId("panels").classList.add("single");
  const timed = data.lines.filter((line) => line.refused === undefined), plots = [];
  for (const [name, lines] of groupedBy(timed, (line) => line.sweep)) {
    if (new Set(lines.map((line) => line.ranks)).size < 2) continue;
    const plot = element("div");
    byId("panels").append(element("section", { class: "panel" }, element("h2", { text: "Efficiency over ranks" }),
                                  element("p", { class: "about", text: name }), plot));
    plots.push({ lines, plot });
  }
  const problems = groupedBy(timed, (line) => line.problem).map(([name, lines]) => addProblem(name, lines));
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
    for (const { lines, plot } of plots) plot.replaceChildren(efficiencyCurves(lines, state.theme));
    for (const { lines, bars } of problems) bars.replaceChildren(timeBars(lines, state.theme));
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
