// Colours that people who see red and green as one can tell apart: eight by hand, more along ramps whose lightness
// never turns back.
const PALETTES = {
  light: {
    ranks: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#3b2a8c", "#8f8f1f"],
    rankRamp: ["#2a1a6e", "#23558f", "#1f8489", "#4ba46a", "#a5b93c", "#e8c22e"],
    stepRamp: ["#1d2a6b", "#5a2a86", "#a32f74", "#d8504c", "#ef8f32", "#f3c552"],
  },
  dark: {
    ranks: ["#4ba3e3", "#f2b134", "#2ec4a0", "#e7a3c8", "#f0743a", "#a5daf8", "#9d8bf0", "#c5c65a"],
    rankRamp: ["#6a5bd0", "#4a86cf", "#3fb0b0", "#74cc86", "#c9d860", "#fbe38a"],
    stepRamp: ["#fbe6a8", "#f7b860", "#ee7f55", "#d4578c", "#a24fb0", "#6f55b8"],
  },
};

const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const css = ([r, g, b]) => `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;
const mix = (a, b, share) => a.map((v, i) => v + (b[i] - v) * share);
const onTop = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#14171a" : "#ffffff");

function ramp(stops, count) {
  const colours = stops.map(hex);
  return Array.from({ length: count }, (_, i) => {
    const at = count === 1 ? 0 : (i / (count - 1)) * (colours.length - 1);
    const low = Math.min(Math.floor(at), colours.length - 2);
    return mix(colours[low], colours[low + 1], at - low);
  });
}

// Colours of one theme for so many ranks and steps.
function makeTheme(dark, ranks, steps) {
  const style = getComputedStyle(document.documentElement);
  const said = (name) => hex(style.getPropertyValue(name).trim());
  const palette = PALETTES[dark ? "dark" : "light"];
  const theme = { dark, empty: said("--empty"), ink: said("--ink"), quiet: said("--quiet"), line: said("--line"),
                  edge: said("--edge"), paper: said("--paper"), soft: said("--soft"), wait: said("--wait"),
                  accent: said("--accent") };
  theme.ranks = ranks <= palette.ranks.length ? palette.ranks.map(hex) : ramp(palette.rankRamp, ranks);
  theme.pale = theme.ranks.map((c) => mix(c, theme.empty, 0.55));
  theme.steps = ramp(palette.stepRamp, Math.max(steps, 1));
  return theme;
}
