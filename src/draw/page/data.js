// The data of an explain page: streams, the rank of each token, the mask, and the slices of every rank.
function sums(list) {
  const out = new Float64Array(list.length);
  let sum = 0;
  for (let i = 0; i < list.length; ++i) out[i] = sum += list[i];
  return out;
}

// The last i in [begin, end) with list[i] <= value, or begin - 1.
function lastAtMost(list, value, begin = 0, end = list.length) {
  while (begin < end) {
    const middle = (begin + end) >> 1;
    if (list[middle] <= value) begin = middle + 1;
    else end = middle;
  }
  return begin - 1;
}

class Stream {
  // bundle: so many documents are drawn as one.
  constructor({ tokens, bundle, offsets, used }) {
    this.tokens = tokens;
    this.bundle = bundle;
    this.offsets = sums(offsets);
    this.used = used;
    this.documents = used.length;
  }

  name(i) {
    const first = i * this.bundle;
    return this.bundle > 1 ? `documents ${grouped(first)} to ${grouped(first + this.bundle - 1)}` : `document ${i}`;
  }

  // The document that a token lies in, or -1. Empty documents hold none.
  document(token) {
    const i = lastAtMost(this.offsets, token);
    return i < this.documents ? i : -1;
  }

  place(token) {
    const document = this.document(token);
    if (document < 0) return null;
    const position = token - this.offsets[document];
    return { document, position, padding: position >= this.used[document] };
  }
}

// Which rank holds a token. Runs are looked up by stride, then by token mod stride, then by first token.
class Holders {
  // coarse: runs are stretches of tokens that mostly belong to the rank.
  constructor({ rows, coarse, runs: columns }) {
    this.coarse = coarse;
    const [ranks, row, token, count, stride] = columns.map(sums);
    const order = Array.from(ranks, (_, i) => i);
    const place = (i) => token[i] % stride[i];
    order.sort((a, b) => stride[a] - stride[b] || place(a) - place(b) || token[a] - token[b]);
    const sorted = (column) => Float64Array.from(order, (i) => column[i]);
    this.rows = rows;
    [this.rank, this.row, this.token, this.count, this.stride] = [ranks, row, token, count, stride].map(sorted);
    this.strides = new Map();
    order.forEach((i, at) => {
      if (!this.strides.has(stride[i])) this.strides.set(stride[i], new Map());
      const places = this.strides.get(stride[i]);
      if (!places.has(place(i))) places.set(place(i), [at, at + 1]);
      else places.get(place(i))[1] = at + 1;
    });
  }

  // The run that holds a token, or -1.
  run(token) {
    for (const [stride, places] of this.strides) {
      const range = places.get(token % stride);
      if (!range) continue;
      const at = lastAtMost(this.token, token, range[0], range[1]);
      if (at >= range[0] && token < this.token[at] + this.count[at] * stride) return at;
    }
    return -1;
  }

  rankOf(token) {
    const at = this.run(token);
    return at < 0 ? -1 : this.rank[at];
  }

  rowOf(token) {
    const at = this.run(token);
    return at < 0 ? -1 : this.row[at] + (token - this.token[at]) / this.stride[at];
  }
}

// The mask's slices by query: slices sorted by first query, under a tree of the largest last query.
class MaskSlices {
  constructor(columns) {
    const [q, qSize, k, kSize, lo, hi] = columns.map(sums);
    const order = Array.from(q, (_, i) => i).sort((a, b) => q[a] - q[b]);
    const sorted = (of) => Float64Array.from(order, of);
    this.size = order.length;
    this.q0 = sorted((i) => q[i]);
    this.q1 = sorted((i) => q[i] + qSize[i]);
    this.k0 = sorted((i) => k[i]);
    this.k1 = sorted((i) => k[i] + kSize[i]);
    this.lo = sorted((i) => lo[i]);
    this.hi = sorted((i) => hi[i]);
    this.leaves = 1;
    while (this.leaves < this.size) this.leaves *= 2;
    this.furthest = new Float64Array(2 * this.leaves).fill(-1);
    this.furthest.set(this.q1, this.leaves);
    for (let i = this.leaves - 1; i > 0; --i)
      this.furthest[i] = Math.max(this.furthest[2 * i], this.furthest[2 * i + 1]);
  }

  // Calls visit(first key, end of keys, slice) for each slice that a query sees keys in.
  at(q, visit) {
    const begun = lastAtMost(this.q0, q) + 1;
    const walk = (node, first, size) => {
      if (first >= begun || this.furthest[node] <= q) return;
      if (size > 1) {
        walk(2 * node, first, size / 2);
        walk(2 * node + 1, first + size / 2, size / 2);
        return;
      }
      const begin = Math.max(this.k0[first], q + this.lo[first]);
      const end = Math.min(this.k1[first], q + this.hi[first] + 1);
      if (begin < end) visit(begin, end, first);
    };
    if (this.size > 0) walk(1, 0, this.leaves);
  }

  sees(q, k) {
    let seen = false;
    this.at(q, (begin, end) => (seen ||= k >= begin && k < end));
    return seen;
  }
}

// One panel's schedule: in which step, and by which slice, a query's rank attends a key's.
class Panel {
  constructor(data, page) {
    Object.assign(this, data, { page });
    const { about, forward, backward } = data.times;
    this.times = { about, forward: readTimeline(forward), backward: readTimeline(backward) };
    this.q = page.layouts[data.q];
    this.k = page.layouts[data.k];
    this.groups = this.ranks / this.ulysses;
    [this.work, this.bytesIn, this.bytesOut, this.backwardIn, this.backwardOut] = data.loads.map(sums);
    this.work = this.work.map((pairHeads) => pairHeads / page.heads[0]);
    this.slices = data.slices && data.slices.map(sums);
    this.slicesOf = new Map();  // rank * steps + step: [begin, end)
    if (this.slices) {
      const [rank, step] = this.slices;
      for (let i = 0; i < rank.length; ++i) {
        const key = rank[i] * this.steps + step[i];
        if (!this.slicesOf.has(key)) this.slicesOf.set(key, [i, i + 1]);
        else this.slicesOf.get(key)[1] = i + 1;
      }
    }
  }

  step(rankQ, rankK) {
    const q = Math.floor(rankQ / this.ulysses), k = Math.floor(rankK / this.ulysses), n = this.groups;
    return this.stepOf.length === n ? this.stepOf[(q - k + n) % n] : this.stepOf[q * n + k];
  }

  // The rank that attends a pair, without a swap of heads; and where in its query buffer a query's row lies.
  attends(rankQ, rankK) {
    const a = this.queryRanks;
    return Math.floor(rankQ / a) * a + (a > 1 ? rankK % a : 0);
  }
  bufferRow(query, rank) {
    const a = this.queryRanks;
    return (a > 1 ? (rank - query.rank + a) % a : query.rank % this.ulysses) * this.q.rows + query.row;
  }

  // The slice of the rank that attends the pair which covers the pair, in rows of the buffers; null if slices were left out.
  slice(query, key, step) {
    const rank = this.attends(query.rank, key.rank);
    if (!this.slices || !this.slicesOf.has(rank * this.steps + step)) return null;
    const [, , q0, qSize, k0, kSize, lo, hi, shift, stride] = this.slices;
    const [begin, end] = this.slicesOf.get(rank * this.steps + step);
    const q = this.bufferRow(query, rank);
    for (let i = begin; i < end; ++i) {
      const k = (key.token - shift[i]) / stride[i];
      if (!Number.isInteger(k) || q < q0[i] || q >= q0[i] + qSize[i] || k < k0[i] || k >= k0[i] + kSize[i]) continue;
      if (k - q < lo[i] || k - q > hi[i]) continue;
      return { number: i - begin, of: end - begin, q: [q0[i], q0[i] + qSize[i]], k: [k0[i], k0[i] + kSize[i]],
               lo: lo[i], hi: hi[i] };
    }
    return null;
  }

  describe(q, k) {
    const page = this.page;
    const end = (token, stream, holders) => {
      const place = stream.place(token), rank = holders.rankOf(token);
      const nowhere = { document: -1, position: -1, padding: true };
      const found = place ? { ...place, name: stream.name(place.document) } : nowhere;
      return { token, ...found, bundled: stream.bundle > 1, rank, row: holders.rowOf(token), coarse: holders.coarse };
    };
    const query = end(q, page.q, this.q), key = end(k, page.k, this.k), visible = page.mask.sees(q, k);
    const step = visible ? this.step(query.rank, key.rank) : -1;
    return { query, key, visible, step, slice: visible ? this.slice(query, key, step) : null };
  }
}

// Events as [kind, name, step, begin, end, amount], in seconds.
function readTimeline({ end, ideal, overlap, names, ranks }) {
  const lines = ranks.map(({ rank, total, events }) => {
    const [what, step, begin, length, amount] = events.map(sums);
    const event = (n, i) => [...names[n], step[i], begin[i] / 1e9, (begin[i] + length[i]) / 1e9, amount[i]];
    return { rank, total, events: Array.from(what, event) };
  });
  return { end, ideal, overlap, ranks: lines };
}

function readPage(data) {
  const page = { ...data, q: new Stream(data.q) };
  page.k = data.k ? new Stream(data.k) : page.q;
  page.self = !data.k;
  page.mask = new MaskSlices(data.mask);
  page.layouts = data.layouts.map((layout) => new Holders(layout));
  page.panels = data.panels.map((panel) => new Panel(panel, page));
  page.ranks = Math.max(...page.panels.map((panel) => panel.ranks));
  page.steps = Math.max(...page.panels.map((panel) => panel.steps));
  return page;
}
