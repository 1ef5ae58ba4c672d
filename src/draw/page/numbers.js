// Numbers for people.
const grouped = (n) => Math.round(n).toLocaleString("en-US");
const counted = (n, thing) => `${grouped(n)} ${thing}${n === 1 ? "" : "s"}`;
const three = (n) => (n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2));

function scaled(value, base, units) {
  let at = 0;
  for (; value >= base - 0.5 && at + 1 < units.length; ++at) value /= base;
  return (at === 0 && Number.isInteger(value) ? String(value) : three(value)) + units[at];
}
const short = (n) => scaled(n, 1000, ["", " k", " M", " G", " T", " P"]);
const bytes = (n) => scaled(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]);

function duration(seconds) {
  if (seconds === 0) return "0";
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${three(seconds * scale)} ${unit}`;
}

// 1, 2 or 5 times a power of ten, at least `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least * 0.999999);
}
