// The legend: a button for each rank or step, or a ramp where there are many. choose(n) highlights one, -1 none.
function drawLegend(box, { word, colours, chosen, note }, choose) {
  box.replaceChildren();
  if (colours.length <= 16) legendButtons(box, word, colours, chosen, choose);
  else legendRamp(box, word, colours, chosen, choose);
  if (note) box.append(element("span", { text: note }));
}

function legendButtons(box, word, colours, chosen, choose) {
  const press = () => {
    for (const [i, button] of buttons.entries()) button.setAttribute("aria-pressed", String(i === chosen));
  };
  const buttons = colours.map((colour, i) => {
    const swatch = element("i");
    swatch.style.background = css(colour);
    const button = element("button", { type: "button", "aria-label": `Highlight ${word} ${i}` }, swatch,
                           document.createTextNode(i === 0 ? `${word} 0` : String(i)));
    button.addEventListener("click", () => {
      chosen = chosen === i ? -1 : i;
      press();
      choose(chosen);
    });
    return button;
  });
  press();
  box.append(...buttons);
}

function legendRamp(box, word, colours, chosen, choose) {
  const last = colours.length - 1, stops = colours.filter((_, i) => i % Math.ceil(colours.length / 24) === 0);
  const ramp = element("i", { class: "ramp" });
  ramp.style.background = `linear-gradient(90deg, ${stops.map(css).join(",")})`;
  const input = element("input", { type: "number", min: "0", max: String(last), placeholder: `one ${word}`,
                                   "aria-label": `Highlight one ${word}` });
  if (chosen >= 0) input.value = String(chosen);
  input.addEventListener("change", () => {
    const value = Math.floor(Number(input.value));
    choose(input.value === "" || Number.isNaN(value) ? -1 : Math.min(Math.max(value, 0), last));
  });
  box.append(element("span", { text: `${word} 0` }), ramp, element("span", { text: String(last) }), input);
}
