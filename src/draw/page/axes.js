// What surrounds the cells of a matrix: the rank of each token along both sides, token numbers, documents, the cross.
const STRIP = 9;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

// One side of the matrix: 0 queries, from top to bottom; 1 keys, from left to right. put: the point at a place along the
// side, so far outside of the matrix.
function sideOf(matrix, number) {
  const { panel, view, margin } = matrix, { page } = panel, rows = number === 0;
  const begin = view.begin[number], size = view.size[number], length = rows ? matrix.height : matrix.width;
  return { rows, length, begin, size, stream: rows ? page.q : page.k, holders: rows ? panel.q : panel.k,
           depth: rows ? matrix.width : matrix.height, cell: length / size, at: (token) => ((token - begin) / size) * length,
           put: (along, away) => rows ? [margin.left - away, margin.top + along] : [margin.left + along, margin.top - away] };
}

function strokeLine(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

// Documents that reach into the view, with where they begin and end on the side; those too small to see are left out.
function* documentsIn(side, least) {
  const { stream, at, begin, size, length } = side;
  let drawn = -Infinity;
  for (let i = Math.max(lastAtMost(stream.offsets, begin), 0); i < stream.documents; ++i) {
    if (stream.offsets[i] >= begin + size) return;
    const from = at(stream.offsets[i]), to = at(stream.offsets[i + 1]);
    if (to <= 0 || to - drawn < least) continue;
    drawn = from;
    yield { document: i, from: Math.max(from, 0), to: Math.min(to, length), whole: to - from, edge: from };
  }
}

function drawStrip(side, context, theme) {
  const count = Math.ceil(side.length);
  const found = sampled(side.begin, (side.size * count) / side.length, count, side.holders, side.stream);
  for (let i = 0; i < count; ++i) {
    let colour = [0, 0, 0];
    for (let s = 0; s < found.n; ++s) {
      const at = i * found.n + s, rank = found.ranks[at], place = side.stream.place(found.tokens[at]);
      const one = rank < 0 || !place || place.padding ? theme.wait : theme.ranks[rank];
      colour = colour.map((v, c) => v + one[c] / found.n);
    }
    context.fillStyle = css(colour);
    context.fillRect(...side.put(i, STRIP + 3), ...(side.rows ? [STRIP, 1.02] : [1.02, STRIP]));
  }
}

function drawTicks(side, context, theme) {
  const step = Math.max(roundStep((side.size * (side.rows ? 26 : 72)) / side.length), 1);
  const middle = side.cell >= 9 ? 0.5 : 0;
  context.fillStyle = css(theme.ink);
  context.strokeStyle = css(theme.edge);
  context.lineWidth = 1;
  context.font = FONT;
  context.textAlign = side.rows ? "right" : "center";
  context.textBaseline = side.rows ? "middle" : "alphabetic";
  for (let t = Math.ceil(side.begin / step) * step; t <= side.begin + side.size && t < side.stream.tokens; t += step) {
    const at = side.at(t + middle);
    if (at < -0.5 || at > side.length + 0.5) continue;
    strokeLine(context, side.put(at, STRIP + 7), side.put(at, STRIP + 3));
    const half = side.rows ? 5 : context.measureText(grouped(t)).width / 2;
    context.fillText(grouped(t), ...side.put(Math.min(Math.max(at, half), side.length - half), STRIP + 10));
  }
}

// Edges through the whole picture where documents are large; else a box around each, or a mark at the side.
function drawEdges(matrix, context, theme) {
  const q = sideOf(matrix, 0), k = sideOf(matrix, 1), { left, top } = matrix.margin;
  context.strokeStyle = css(theme.edge);
  context.lineWidth = 1;
  for (const side of [q, k]) {
    const shown = [...documentsIn(side, 3)], few = shown.length <= 16;
    context.globalAlpha = few ? 0.6 : 1;
    for (const { edge } of shown)
      if (edge > 0.5) strokeLine(context, side.put(edge, STRIP + 3), side.put(edge, few ? -side.depth : 0));
    if (few || !side.rows) continue;
    context.globalAlpha = 0.45;
    for (const { document, whole } of shown) {
      const [x0, x1] = [0, 1].map((i) => Math.min(Math.max(k.at(k.stream.offsets[document + i]), 0), matrix.width));
      const [y0, y1] = [0, 1].map((i) => Math.min(Math.max(q.at(q.stream.offsets[document + i]), 0), matrix.height));
      if (whole >= 6 && x1 - x0 >= 3) context.strokeRect(left + x0, top + y0, x1 - x0, y1 - y0);
    }
  }
  context.globalAlpha = 1;
}

// Names of documents, the largest first, where no other name is in the way.
function drawDocuments(side, context, theme) {
  const taken = [];
  context.font = FONT;
  context.fillStyle = css(theme.quiet);
  context.textAlign = "center";
  context.textBaseline = "middle";
  const shown = [...documentsIn(side, 8)].sort((a, b) => b.to - b.from - (a.to - a.from)).slice(0, 60);
  for (const { document, from, to } of shown) {
    const name = side.stream.name(document), wide = context.measureText(name).width <= to - from - 6;
    const label = wide ? name : `doc ${document * side.stream.bundle}`, half = context.measureText(label).width / 2 + 4;
    const at = Math.min(Math.max((from + to) / 2, half - 4), side.length - half + 4);
    if (to - from < 10 || taken.some(([a, b]) => at - half < b && at + half > a)) continue;
    taken.push([at - half, at + half]);
    context.save();
    const [x, y] = side.put(at, 0);
    context.translate(side.rows ? 8 : x, side.rows ? y : 22);
    if (side.rows) context.rotate(-Math.PI / 2);
    context.fillText(label, 0, 0);
    context.restore();
  }
}

// Lines between the cells where these are large enough, and the rank or step in each where these are larger still.
function drawGrid(matrix, context, theme, mode) {
  const { panel, view, margin } = matrix, q = sideOf(matrix, 0), k = sideOf(matrix, 1);
  if (Math.min(q.cell, k.cell) < 7) return;
  context.save();
  context.beginPath();
  context.rect(margin.left, margin.top, matrix.width, matrix.height);
  context.clip();
  context.strokeStyle = css(theme.paper);
  context.lineWidth = 1;
  context.beginPath();
  for (let t = Math.ceil(q.begin); t < q.begin + q.size; ++t) {
    context.moveTo(margin.left, margin.top + q.at(t));
    context.lineTo(margin.left + matrix.width, margin.top + q.at(t));
  }
  for (let t = Math.ceil(k.begin); t < k.begin + k.size; ++t) {
    context.moveTo(margin.left + k.at(t), margin.top);
    context.lineTo(margin.left + k.at(t), margin.top + matrix.height);
  }
  context.stroke();
  if (Math.min(q.cell, k.cell) >= 20) {
    const shade = matrix.shade(theme, mode, -1);
    context.font = FONT;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = Math.floor(view.begin[0]); i < Math.min(q.begin + q.size, q.stream.tokens); ++i)
      panel.page.mask.at(i, (begin, end) => {
        const rankQ = panel.q.rankOf(i);
        for (let j = Math.max(begin, Math.floor(k.begin)); j < Math.min(end, k.begin + k.size); ++j) {
          const rankK = panel.k.rankOf(j), [x, y] = matrix.point(i, j);
          const label = mode === "query" ? rankQ : mode === "key" ? rankK : panel.step(rankQ, rankK);
          context.fillStyle = onTop(shade(rankQ, rankK));
          context.fillText(String(label), x, y);
        }
      });
  }
  context.restore();
}

function drawCross(matrix, context, theme) {
  const { view, margin } = matrix;
  if (!view.cross) return;
  const q = sideOf(matrix, 0), k = sideOf(matrix, 1), [i, j] = view.cross;
  const y = margin.top + q.at(i), x = margin.left + k.at(j), high = Math.max(q.cell, 1), wide = Math.max(k.cell, 1);
  context.save();
  context.beginPath();
  context.rect(margin.left - STRIP - 3, margin.top - STRIP - 3, matrix.width + STRIP + 3, matrix.height + STRIP + 3);
  context.clip();
  context.fillStyle = css(theme.ink);
  context.globalAlpha = 0.13;
  context.fillRect(margin.left - STRIP - 3, y, matrix.width + STRIP + 3, high);
  context.fillRect(x, margin.top - STRIP - 3, wide, matrix.height + STRIP + 3);
  context.globalAlpha = 1;
  context.strokeStyle = css(theme.ink);
  context.lineWidth = 1.5;
  context.strokeRect(x - 0.5, y - 0.5, wide + 1, high + 1);
  context.restore();
}

function drawAxes(matrix, context, theme, mode) {
  const { margin } = matrix;
  drawGrid(matrix, context, theme, mode);
  drawEdges(matrix, context, theme);
  for (const side of [sideOf(matrix, 0), sideOf(matrix, 1)])
    for (const drawPart of [drawStrip, drawTicks, drawDocuments]) drawPart(side, context, theme);
  context.strokeStyle = css(theme.edge);
  context.lineWidth = 1;
  context.strokeRect(margin.left - 0.5, margin.top - 0.5, matrix.width + 1, matrix.height + 1);
  context.fillStyle = css(theme.quiet);
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillText("keys →", margin.left, 7);
  context.textAlign = "right";
  context.fillText("queries ↓", margin.left - STRIP - 10, margin.top - 10);
  drawCross(matrix, context, theme);
}
