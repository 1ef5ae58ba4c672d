// What all pages share: heading and footer, light and dark, the choice of a pass, printing. All text reaches the page as
// text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { pass: "forward", theme: null, printing: false };

const isDark = () => !state.printing && (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

const isShortcut = (event) =>
    !(event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input[type=number]"));

// Radio buttons: [value, words] each.
function addChoices(box, name, choices, now, choose) {
  for (const [value, words] of choices) {
    const input = element("input", { type: "radio", name, value });
    input.checked = value === now;
    input.addEventListener("change", () => choose(value));
    box.append(element("label", {}, input, document.createTextNode(words)));
  }
}

// A printed page is light, and as wide as the sheet.
function listenToPrinter(setTheme) {
  const root = document.documentElement;
  let before;
  const printing = (now) => () => {
    if (now) before = root.dataset.theme;
    state.printing = now;
    root.classList.toggle("paper", now);
    if (now) root.dataset.theme = "light";
    else if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    setTheme();
  };
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
}

// showPass(pass), setColours() after a change of the theme, layOut() after a change of size or pass.
function startShell({ title, words, ranks, steps, passes, showPass, setColours, layOut }) {
  byId("title").textContent = title;
  byId("words").textContent = words;
  byId("command").textContent = data.command;
  byId("made").textContent = `Weft ${data.version}`;
  const setTheme = () => {
    state.theme = makeTheme(data.palettes, isDark(), ranks, steps);
    byId("theme").textContent = isDark() ? "Light" : "Dark";
    setColours();
  };
  addChoices(byId("passes"), "pass", passes.map((pass) => [pass, pass]), state.pass, (pass) => {
    state.pass = pass;
    showPass(pass);
    layOut();
  });
  const turn = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    setTheme();
  };
  const help = () => {
    byId("keys").hidden = !byId("keys").hidden;
    byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
  };
  byId("theme").addEventListener("click", turn);
  byId("help").addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    if (isShortcut(event) && event.key === "t") turn();
    if (isShortcut(event) && event.key === "?") help();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
  listenToPrinter(setTheme);
  new ResizeObserver(layOut).observe(byId("panels"));
  setTheme();
}
