// Work and bytes of each rank, on one scale in all panels; and tables.
const LISTED = 24;  // more ranks than this are drawn as columns

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const most = (list) => list.reduce((a, b) => Math.max(a, b), 0);
const least = (list) => list.reduce((a, b) => Math.min(a, b), Infinity);
const mean = (list) => list.reduce((a, b) => a + b, 0) / Math.max(list.length, 1);

function track(parts, scale) {
  const bar = element("div", { class: "track", "aria-hidden": "true" });
  for (const [value, colour] of parts) {
    const part = element("b");
    part.style.width = `${scale > 0 ? (100 * value) / scale : 0}%`;
    part.style.background = colour;
    bar.append(part);
  }
  return bar;
}

function listBars(panel, theme, scale) {
  const box = element("div", { class: "loads", role: "img" });
  const head = (text, wide = "") => element("span", { class: `head${wide}`, text });
  box.append(head("rank"), head("work: visible pairs", " wide"), head("bytes in: forward, backward", " wide"));
  for (let r = 0; r < panel.ranks; ++r) {
    const solid = css(theme.ranks[r]), pale = css(theme.pale[r]);
    box.append(element("span", { class: "value", text: String(r) }), track([[panel.work[r], solid]], scale.work),
               element("span", { class: "value", text: grouped(panel.work[r]) }),
               track([[panel.bytesIn[r], solid], [panel.backwardIn[r], pale]], scale.bytes),
               element("span", { class: "value", text: `${bytes(panel.bytesIn[r])}, ${bytes(panel.backwardIn[r])}` }));
  }
  return box;
}

// Many ranks: a column each, from the left to the right.
function columnBars(values, back, theme, scale, say) {
  const canvas = element("canvas", { role: "img", "aria-label": say, height: "140" });
  canvas.style.height = "70px";
  const width = (canvas.width = 1200), height = canvas.height, context = canvas.getContext("2d");
  context.fillStyle = css(theme.soft);
  context.fillRect(0, 0, width, height);
  const top = Math.max(scale, 1);
  for (let x = 0; x < width; ++x) {
    const r = Math.floor((x * values.length) / width), whole = ((values[r] + (back ? back[r] : 0)) / top) * height;
    context.fillStyle = css(theme.pale[r]);
    context.fillRect(x, height - whole, 1, whole);
    context.fillStyle = css(theme.ranks[r]);
    context.fillRect(x, height - (values[r] / top) * height, 1, (values[r] / top) * height);
  }
  return canvas;
}

// "3 MiB to 5 MiB", or once if all are the same.
const span = (list, say) => [...new Set([least(list), most(list)].map(say))].join(" to ");

function drawBars(panel, theme, scale) {
  const work = `${span(panel.work, grouped)} visible pairs a rank, mean ${grouped(mean(panel.work))}`;
  const moved = `${span(panel.bytesIn, bytes)} into a rank forward, ${span(panel.backwardIn, bytes)} backward`;
  const box = element("div");
  const more = `the busiest rank has ${(100 * (panel.imbalance - 1)).toFixed(1)} % more than the mean`;
  box.append(element("h3", { text: "Work and bytes " },
                     element("small", { text: `imbalance ${panel.imbalance.toFixed(3)}: ${more}` })));
  if (panel.ranks <= LISTED) {
    const list = listBars(panel, theme, scale);
    list.setAttribute("aria-label", `${work}; ${moved}`);
    box.append(list);
  } else {
    box.append(element("p", { class: "about", text: work }), columnBars(panel.work, null, theme, scale.work, work),
               element("p", { class: "about", text: moved }),
               columnBars(panel.bytesIn, panel.backwardIn, theme, scale.bytes, moved));
  }
  return box;
}

// A table with a row heading first in each row.
function table(heads, rows) {
  const head = heads.map((text) => element("th", { text, scope: "col" }));
  const body = rows.map(([name, ...cells]) => element("tr", {}, element("th", { text: name, scope: "row" }),
                                                      ...cells.map((text) => element("td", { text }))));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

function numbersTable(panel) {
  const heads = ["rank", "visible pairs", "of mean", "forward in", "forward out", "backward in", "backward out"];
  const moved = [panel.bytesIn, panel.bytesOut, panel.backwardIn, panel.backwardOut];
  const average = mean(panel.work), shown = Math.min(panel.ranks, 512);
  const rows = Array.from({ length: shown }, (_, r) => [
    String(r), grouped(panel.work[r]), (average > 0 ? panel.work[r] / average : 1).toFixed(3),
    ...moved.map((list) => bytes(list[r]))]);
  const more = shown < panel.ranks ? ` (the first ${shown} of ${panel.ranks} ranks)` : "";
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of each rank" };
  return element("details", {}, element("summary", { text: `Numbers${more}` }), element("div", region, table(heads, rows)));
}
