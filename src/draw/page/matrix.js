// The mask as a matrix on a canvas. A frame looks only at the tokens under its pixels: for a row of pixels the mask gives
// the keys that its queries see. So a million tokens cost what a thousand do, and a single token is exact.
const SAMPLES = 4;  // tokens that a pixel looks at when it stands for many

// The tokens under each of `count` pixels along one side, and who holds them.
function sampled(begin, size, count, holders, stream) {
  const each = size / count, n = each > 1 ? SAMPLES : 1;
  const tokens = new Float64Array(count * n), ranks = new Int32Array(count * n), mixed = new Uint8Array(count);
  for (let i = 0; i < count; ++i)
    for (let s = 0; s < n; ++s) {
      const at = i * n + s;
      tokens[at] = Math.min(Math.floor(begin + (i + (s + 0.5) / n) * each), stream.tokens - 1);
      ranks[at] = at > 0 && tokens[at] === tokens[at - 1] ? ranks[at - 1] : holders.rankOf(tokens[at]);
      if (s > 0 && ranks[at] !== ranks[at - s]) mixed[i] = 1;
    }
  return { n, each, tokens, ranks, mixed };
}

class Matrix {
  constructor(panel, view, canvas) {
    Object.assign(this, { panel, view, canvas });
    this.margin = { left: 98, top: 62, right: 6, bottom: 6 };
    this.buffer = document.createElement("canvas");
    this.width = this.height = 0;
  }

  resize() {
    const width = Math.max(this.canvas.clientWidth, 240), margin = this.margin;
    const side = width - margin.left - margin.right;
    this.width = side;
    this.height = side;
    this.canvas.style.height = `${side + margin.top + margin.bottom}px`;
  }

  // Token (with its fraction) under a point of the canvas, as [query, key].
  at(x, y) {
    const { begin, size } = this.view, { left, top } = this.margin;
    return [begin[0] + ((y - top) / this.height) * size[0], begin[1] + ((x - left) / this.width) * size[1]];
  }

  inside(x, y) {
    const { left, top } = this.margin;
    return x >= left && y >= top && x < left + this.width && y < top + this.height;
  }

  // Middle of a cell on the canvas.
  point(q, k) {
    const { begin, size } = this.view, { left, top } = this.margin;
    return [left + ((k + 0.5 - begin[1]) / size[1]) * this.width, top + ((q + 0.5 - begin[0]) / size[0]) * this.height];
  }

  draw(theme, mode, chosen, ratio, quick) {
    const { canvas, margin } = this;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round((this.height + margin.top + margin.bottom) * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = css(theme.paper);
    context.fillRect(0, 0, canvas.clientWidth, this.height + margin.top + margin.bottom);
    this.cells(theme, mode, chosen, quick ? Math.min(ratio, 1) : ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.buffer, margin.left, margin.top, this.width, this.height);
    drawAxes(this, context, theme, mode);
  }

  // Colour of a pair by the ranks of its two tokens.
  shade(theme, mode, chosen) {
    const { panel } = this, away = (colour) => mix(colour, theme.empty, 0.86);
    return (rankQ, rankK) => {
      if (rankQ < 0 || rankK < 0) return theme.quiet;
      if (mode === "step") {
        const step = panel.step(rankQ, rankK), colour = theme.steps[Math.max(step, 0)];
        return chosen < 0 || chosen === step ? colour : away(colour);
      }
      const rank = mode === "query" ? rankQ : rankK;
      const colour = rankQ === rankK ? theme.ranks[rank] : theme.pale[rank];
      return chosen < 0 || chosen === rank ? colour : away(colour);
    };
  }

  cells(theme, mode, chosen, ratio) {
    const { panel, view } = this, mask = panel.page.mask;
    const width = Math.max(Math.round(this.width * ratio), 1), height = Math.max(Math.round(this.height * ratio), 1);
    this.buffer.width = width;
    this.buffer.height = height;
    const context = this.buffer.getContext("2d"), image = context.createImageData(width, height), out = image.data;
    const rows = sampled(view.begin[0], view.size[0], height, panel.q, panel.page.q);
    const columns = sampled(view.begin[1], view.size[1], width, panel.k, panel.page.k);
    const shade = this.shade(theme, mode, chosen), memory = new Map();
    const shaded = (rankQ, rankK) => {
      const key = rankQ * 1048576 + rankK;
      let colour = memory.get(key);
      if (!colour) memory.set(key, (colour = shade(rankQ, rankK)));
      return colour;
    };
    const part = new Float32Array(width + 1), change = new Float32Array(width + 1);
    const scale = width / view.size[1], from = view.begin[1], [er, eg, eb] = theme.empty;
    const cover = (begin, end) => {
      const a = Math.max((begin - from) * scale, 0), b = Math.min((end - from) * scale, width);
      if (a >= b) return;
      const i = Math.floor(a), j = Math.floor(b);
      if (i === j) return void (part[i] += b - a);
      part[i] += i + 1 - a;
      part[j] += b - j;
      change[i + 1] += 1;
      change[j] -= 1;
    };
    const many = Math.max(rows.each, columns.each) > 1;
    for (let y = 0; y < height; ++y) {
      part.fill(0);
      change.fill(0);
      for (let s = 0; s < rows.n; ++s) mask.at(rows.tokens[y * rows.n + s], cover);
      const rankQ = rows.ranks[y * rows.n];
      let whole = 0, last = -2, colour = theme.empty, at = 4 * y * width;
      for (let x = 0; x < width; ++x, at += 4) {
        whole += change[x];
        let covered = (whole + part[x]) / rows.n;
        if (covered <= 0.001) {
          out[at] = er, out[at + 1] = eg, out[at + 2] = eb, out[at + 3] = 255;
          continue;
        }
        // Keeps what is smaller than a pixel visible.
        covered = many ? Math.min(1, 0.3 + 0.7 * covered) : Math.min(1, covered);
        if (rows.mixed[y] || columns.mixed[x]) {
          colour = [0, 0, 0];
          for (let s = 0; s < SAMPLES; ++s) {
            const one = shaded(rows.ranks[y * rows.n + (s % rows.n)], columns.ranks[x * columns.n + (s % columns.n)]);
            for (let c = 0; c < 3; ++c) colour[c] += one[c] / SAMPLES;
          }
          last = -2;
        } else if (columns.ranks[x * columns.n] !== last) {
          last = columns.ranks[x * columns.n];
          colour = shaded(rankQ, last);
        }
        out[at] = er + (colour[0] - er) * covered;
        out[at + 1] = eg + (colour[1] - eg) * covered;
        out[at + 2] = eb + (colour[2] - eb) * covered;
        out[at + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
  }
}
