// Dark and light: the browser's choice, or the user's.

import { prefer, preference } from "./store.js";

function show(theme) {
  document.documentElement.dataset.theme = theme;
}

// Shows the theme that was chosen; `select`, if there is one, chooses another.
export async function keepTheme(select = null) {
  const theme = (await preference("theme")) ?? "";
  show(theme);
  if (!select) return;
  select.value = theme;
  select.addEventListener("change", () => {
    show(select.value);
    prefer("theme", select.value);
  });
}
