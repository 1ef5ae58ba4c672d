// The visible part of the matrix, in tokens; the same in all panels, so that they can be compared.
class View {
  constructor(queries, keys) {
    this.total = [Math.max(queries, 1), Math.max(keys, 1)];
    this.listeners = [];
    this.cross = null;  // [query, key] that is looked at
    this.fit(false);
  }

  fit(tell = true) {
    this.begin = [0, 0];
    this.size = [...this.total];
    if (tell) this.changed();
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  // Least size: a few tokens fill the picture.
  clamp() {
    for (const side of [0, 1]) {
      const least = Math.min(4, this.total[side]);
      this.size[side] = Math.min(Math.max(this.size[side], least), this.total[side]);
      this.begin[side] = Math.min(Math.max(this.begin[side], 0), this.total[side] - this.size[side]);
    }
  }

  // By a factor, around a point given as fractions of the picture.
  zoom(factor, at = [0.5, 0.5]) {
    const size = [...this.size];
    for (const side of [0, 1]) {
      const least = Math.min(4, this.total[side]);
      factor = Math.max(factor, Math.min(1, least / size[side]));
    }
    for (const side of [0, 1]) {
      const fixed = this.begin[side] + at[side] * size[side];
      this.size[side] = Math.min(size[side] * factor, this.total[side]);
      this.begin[side] = fixed - at[side] * this.size[side];
    }
    this.clamp();
    this.changed();
  }

  move(queries, keys) {
    this.begin[0] += queries;
    this.begin[1] += keys;
    this.clamp();
    this.changed();
  }

  // The cross on a cell; the picture follows it if asked.
  look(q, k, follow) {
    const cross = [q, k].map((t, side) => Math.min(Math.max(Math.floor(t), 0), this.total[side] - 1));
    this.cross = cross;
    if (follow)
      for (const side of [0, 1]) {
        const margin = Math.min(this.size[side] * 0.05, 1);
        if (cross[side] < this.begin[side]) this.begin[side] = cross[side] - margin;
        if (cross[side] + 1 > this.begin[side] + this.size[side])
          this.begin[side] = cross[side] + 1 + margin - this.size[side];
      }
    this.clamp();
    this.changed();
  }

  clearCross() {
    this.cross = null;
    this.changed();
  }
}
