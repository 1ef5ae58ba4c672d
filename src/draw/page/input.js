// Mouse, touch and keyboard on a matrix. show(matrix, spoken) describes the pair under the cross.
function listenTo(matrix, show, hide) {
  const { canvas, view } = matrix, pointers = new Map();
  let moved = false, apart = 0;
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const fraction = ([x, y]) => [(y - matrix.margin.top) / matrix.height, (x - matrix.margin.left) / matrix.width];
  const look = ([x, y], spoken) => {
    if (!matrix.inside(x, y)) return hide();
    view.look(...matrix.at(x, y), false);
    show(matrix, spoken);
  };

  canvas.addEventListener("wheel", (event) => {
    if (!matrix.inside(...point(event))) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    view.zoom(Math.exp(Math.min(Math.max(event.deltaY * lines, -240), 240) * 0.0025), fraction(point(event)));
    look(point(event), false);
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, point(event));
    moved = pointers.size > 1;
    apart = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = point(event), before = pointers.get(event.pointerId);
    if (!before) return event.pointerType === "mouse" ? look(now, false) : undefined;
    if (!moved && Math.hypot(now[0] - before[0], now[1] - before[1]) < 4) return;
    moved = true;
    canvas.classList.add("moving");
    hide();
    pointers.set(event.pointerId, now);
    const fingers = [...pointers.values()];
    if (fingers.length === 2) {
      const [a, b] = fingers, distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
      if (apart > 0) view.zoom(apart / Math.max(distance, 1), fraction([(a[0] + b[0]) / 2, (a[1] + b[1]) / 2]));
      apart = distance;
    }
    const part = 1 / fingers.length;
    view.move(((before[1] - now[1]) / matrix.height) * view.size[0] * part,
              ((before[0] - now[0]) / matrix.width) * view.size[1] * part);
  });
  const release = (event) => {
    const tapped = pointers.delete(event.pointerId) && !moved && event.type === "pointerup";
    if (tapped) look(point(event), event.pointerType !== "mouse");
    apart = 0;
    if (pointers.size === 0) canvas.classList.remove("moving");
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && pointers.size === 0 && hide());
  canvas.addEventListener("dblclick", (event) => view.zoom(0.4, fraction(point(event))));

  // From the cross by one cell (a pixel's worth of tokens if they are smaller), or to the next document.
  const next = (side, way, byDocument) => {
    const from = view.cross[side], stream = side === 0 ? matrix.panel.page.q : matrix.panel.page.k;
    const pixel = view.size[side] / (side === 0 ? matrix.height : matrix.width);
    if (!byDocument) return from + way * Math.max(1, Math.round(2 * pixel));
    const document = stream.document(from) + (way > 0 || stream.place(from)?.position === 0 ? way : 0);
    return stream.documents ? stream.offsets[Math.min(Math.max(document, 0), stream.documents - 1)] : from;
  };
  canvas.addEventListener("keydown", (event) => {
    const arrow = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [1, -1], ArrowRight: [1, 1] }[event.key];
    if (event.altKey || event.metaKey || (event.ctrlKey && !arrow)) return;
    const centre = () => view.cross && view.cross.map((t, side) => (t + 0.5 - view.begin[side]) / view.size[side]);
    if (arrow && event.shiftKey) {
      const by = [0, 0];
      by[arrow[0]] = arrow[1] * view.size[arrow[0]] * 0.15;
      view.move(...by);
    } else if (arrow) {
      if (view.cross) {
        const cross = [...view.cross];
        cross[arrow[0]] = next(arrow[0], arrow[1], event.ctrlKey);
        view.look(...cross, true);
      } else {
        view.look(view.begin[0] + view.size[0] / 2, view.begin[1] + view.size[1] / 2, true);
      }
      show(matrix, true);
    } else if (event.key === "+" || event.key === "=") {
      view.zoom(0.6, centre() || undefined);
    } else if (event.key === "-" || event.key === "_") {
      view.zoom(1 / 0.6, centre() || undefined);
    } else if (event.key === "0" || event.key === "Home") {
      view.fit();
    } else if (event.key === "Escape") {
      hide();
    } else {
      return;
    }
    event.preventDefault();
    if (view.cross && event.key !== "Escape") show(matrix, Boolean(arrow));
  });
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && view.cross && show(matrix, true));
  canvas.addEventListener("blur", hide);
}
