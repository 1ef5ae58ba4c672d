// The tip beside the cell or event under the pointer; spoken too if the keyboard moved there.
function endWords({ token, document, name, position, padding, bundled, rank, row, coarse }) {
  const place = padding ? "padding" : `position ${grouped(position)}`;
  const inside = bundled ? `one of ${name}` : `${name}, ${place}`;
  const held = coarse ? `about rank ${rank}` : `rank ${rank}, row ${grouped(row)}`;
  return [`token ${grouped(token)}`, document < 0 ? "in no document" : inside, rank < 0 ? "on no rank" : held]
      .join(" · ");
}

function whyNot({ query, key }) {
  if (query.bundled || key.bundled) return "no";
  if (query.padding || key.padding) return "no: padding";
  return query.document !== key.document ? "no: another document" : "no: outside the mask";
}

function attendedWords(panel, { query, key, step }) {
  const first = Math.floor(query.rank / panel.ulysses) * panel.ulysses, last = first + panel.ulysses - 1;
  const rank = panel.attends(query.rank, key.rank);
  const who = panel.ulysses > 1 ? `ranks ${first} to ${last}, each for its heads` : `rank ${rank}`;
  const end = step + panel.headSteps - 1;
  const when = end > step ? `steps ${step} to ${end}, a group of heads each` : `step ${step} of ${panel.steps}`;
  const from = (rank === query.rank ? "" : `the query comes from rank ${query.rank}, `) +
      (rank === key.rank ? "the key is its own" : `the key comes from rank ${key.rank}`);
  return `by ${who} in ${when}${panel.ulysses > 1 ? "" : `; ${from}`}`;
}

function sliceWords({ number, of, q, k, lo, hi }, far) {
  const range = ([begin, end]) => `[${grouped(begin)}, ${grouped(end)})`;
  const low = lo > -far ? `${grouped(lo)} ≤ ` : "", high = hi < far ? ` ≤ ${grouped(hi)}` : "";
  return `${number} of ${of}: q ${range(q)}, k ${range(k)}, ${low || high ? `${low}k − q${high}` : "every pair"}`;
}

// [name, words] of a pair.
function pairLines(panel, [q, k]) {
  const found = panel.describe(q, k);
  const lines = [["Query", endWords(found.query)], ["Key", endWords(found.key)]], { maskBundle } = panel.page;
  if (maskBundle > 1) return [...lines, ["Visible", `not known: ${grouped(maskBundle)} slices are drawn as one`]];
  if (!found.visible) return [...lines, ["Visible", whyNot(found)]];
  if (found.query.coarse || found.key.coarse) return [...lines, ["Attended", "not known: ranks are drawn coarsely"]];
  lines.push(["Attended", attendedWords(panel, found)]);
  if (found.slice) lines.push(["Slice", sliceWords(found.slice, panel.page.far)]);
  else if (!panel.slices)
    lines.push(["Slice", `not listed: ${counted(panel.slicesTotal, "slice")} do not fit the page`]);
  return lines;
}

// Beside a point of the window, inside of it.
function showTip(lines, x, y, spoken) {
  const tip = document.getElementById("tip");
  const entries = lines.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })]);
  tip.replaceChildren(element("dl", {}, ...entries));
  tip.hidden = false;
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(6, x + 18 + wide > innerWidth ? x - wide - 14 : x + 18)}px`;
  tip.style.top = `${Math.max(6, y + 18 + high > innerHeight ? y - high - 14 : y + 18)}px`;
  if (spoken) document.getElementById("said").textContent = lines.map(([name, text]) => `${name}: ${text}`).join(". ");
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
