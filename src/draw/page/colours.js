// Colours, from the palettes in the data.
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const css = ([r, g, b]) => `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;
const mix = (a, b, weight) => a.map((v, i) => v + (b[i] - v) * weight);
const onTop = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14171a" : "#ffffff");

function ramp(stops, count) {
  const colours = stops.map(hex);
  return Array.from({ length: count }, (_, i) => {
    const at = count === 1 ? 0 : (i / (count - 1)) * (colours.length - 1);
    const low = Math.min(Math.floor(at), colours.length - 2);
    return mix(colours[low], colours[low + 1], at - low);
  });
}

// Colours of one theme for so many ranks and steps, which the style sheet gets too.
function makeTheme(palettes, dark, ranks, steps) {
  const palette = palettes[dark ? "dark" : "light"], theme = { dark }, { style } = document.documentElement;
  style.colorScheme = dark ? "dark" : "light";
  for (const [name, colour] of Object.entries(palette.plain)) {
    theme[name] = hex(colour);
    style.setProperty(`--${name}`, colour);
  }
  theme.ranks = ranks <= palette.ranks.length ? palette.ranks.map(hex) : ramp(palette.rankRamp, ranks);
  theme.pale = theme.ranks.map((c) => mix(c, theme.empty, 0.55));
  theme.steps = ramp(palette.stepRamp, Math.max(steps, 1));
  return theme;
}
