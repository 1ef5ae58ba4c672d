// When ranks compute and exchange: a lane for each rank, computes above, exchanges below, coloured by step.
const LANES = "a lane for each rank, coloured by step: computes above, exchanges below; grey: passes over rows, swaps of " +
    "heads";
const KINDS = ["compute", "exchange", "rows", "wait"];

class TimelineChart {
  constructor(panel, canvas) {
    Object.assign(this, { panel, canvas });
    this.left = 48;
    this.top = 20;
    this.show("forward", 1);
  }

  show(pass, end) {
    this.pass = this.panel.times[pass];
    this.end = end || 1;
    this.lines = this.pass.ranks;
    this.lane = this.lines.length <= 8 ? 26 : this.lines.length <= 16 ? 18 : 13;
    this.chosen = null;  // [line, event]
  }

  resize() {
    this.width = Math.max(this.canvas.clientWidth, 200);
    this.height = this.top + this.lines.length * this.lane + 4;
    this.canvas.style.height = `${this.height}px`;
  }

  x(time) {
    return this.left + (time / this.end) * (this.width - this.left - 8);
  }

  // Where an event is drawn.
  box(line, [kind, , , begin, end]) {
    const y = this.top + line * this.lane, high = this.lane - 3, split = Math.round(high * 0.62);
    const x = this.x(begin), wide = Math.max(this.x(end) - x, 0.5);
    return KINDS[kind] === "exchange" ? [x, y + split + 1, wide, high - split - 1] : [x, y, wide, split];
  }

  draw(theme, ratio) {
    const { canvas } = this;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = css(theme.paper);
    context.fillRect(0, 0, this.width, this.height);
    this.drawAxis(context, theme);
    this.lines.forEach((line, at) => {
      context.fillStyle = css(theme.ink);
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(String(line.rank), this.left - 12, this.top + at * this.lane + this.lane / 2 - 1);
      context.fillStyle = css(theme.soft);
      context.fillRect(this.left, this.top + at * this.lane, this.x(this.end) - this.left, this.lane - 3);
      for (const event of line.events) this.drawEvent(context, theme, at, event);
    });
    if (this.chosen) {
      const [line, event] = this.chosen, [x, y, wide, high] = this.box(line, this.lines[line].events[event]);
      context.strokeStyle = css(theme.ink);
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, wide + 2, high + 2);
    }
  }

  drawEvent(context, theme, line, event) {
    const [kind, , step] = event, [x, y, wide, high] = this.box(line, event), name = KINDS[kind];
    const colour = step >= 0 ? theme.steps[Math.min(step, theme.steps.length - 1)] : theme.quiet;
    const gap = wide > 3 ? 0.75 : 0;
    if (name === "wait") {
      context.fillStyle = css(theme.wait);
      context.fillRect(x, y + high * 0.35, wide, high * 0.3);
    } else {
      const pale = { exchange: 0.35, rows: 0.6 }[name] || 0;
      context.fillStyle = css(mix(colour, theme.soft, pale));
      context.fillRect(x, y, wide - gap, high);
    }
    if (name === "compute" && wide > 16 && high >= 11 && step >= 0) {
      context.fillStyle = onTop(colour);
      context.textAlign = "center";
      context.fillText(String(step), x + wide / 2, y + high / 2 + 0.5);
    }
  }

  drawAxis(context, theme) {
    context.font = FONT;
    context.textBaseline = "middle";
    const step = roundStep((this.end * 86) / Math.max(this.width - this.left, 100));
    for (let n = 0; n * step <= this.end * 1.0001; ++n) {
      const x = this.x(n * step);
      context.strokeStyle = css(theme.line);
      context.beginPath();
      context.moveTo(x, this.top - 5);
      context.lineTo(x, this.height);
      context.stroke();
      const label = duration(n * step), half = context.measureText(label).width / 2;
      context.fillStyle = css(theme.quiet);
      context.textAlign = "center";
      context.fillText(n === 0 ? "0" : label, Math.min(x, this.width - half), 7);
    }
    context.textAlign = "right";
    context.fillStyle = css(theme.quiet);
    context.fillText("rank", this.left - 12, 7);
  }

  // [line, event] under a point.
  find(x, y) {
    const line = Math.floor((y - this.top) / this.lane);
    if (!this.lines[line]) return null;
    const hit = (event) => {
      const [bx, by, wide, high] = this.box(line, event);
      return x >= bx - 1 && x <= bx + wide + 1 && y >= by - 1 && y <= by + high + 1;
    };
    const event = this.lines[line].events.findIndex(hit);
    return event < 0 ? null : [line, event];
  }

  words([line, event]) {
    const [kind, name, step, begin, end, amount] = this.lines[line].events[event];
    const what = KINDS[kind] === "compute" ? counted(Math.round(amount / this.panel.page.heads[0]), "visible pair")
        : KINDS[kind] === "exchange" ? `${bytes(amount)} in` : "";
    const done = `${KINDS[kind]}: ${name}${step >= 0 ? `, step ${step}` : ""}`;
    return [["Rank", String(this.lines[line].rank)], ["What", done], ...(what ? [["How much", what]] : []),
            ["When", `${duration(begin)} to ${duration(end)} (${duration(end - begin)})`]];
  }

  // The next event by an arrow key.
  step(key) {
    const lines = this.lines.length;
    if (!lines || !this.lines.some((line) => line.events.length)) return null;
    let [line, event] = this.chosen || [0, -1];
    if (key === "ArrowRight") ++event;
    else if (key === "ArrowLeft") --event;
    else if (key === "ArrowDown") line = Math.min(line + 1, lines - 1);
    else if (key === "ArrowUp") line = Math.max(line - 1, 0);
    else return null;
    const events = this.lines[line].events.length;
    if (events) this.chosen = [line, Math.min(Math.max(event, 0), events - 1)];
    return this.chosen;
  }
}

const timelineCanvas = (words) => element("canvas", { class: "timeline", tabindex: "0", role: "application",
                                                      "aria-label": `Timeline, ${words}. Arrows go from event to event.` });

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
