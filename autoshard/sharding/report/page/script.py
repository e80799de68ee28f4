"""The script of a plan's page: search fields, axis buttons, details of devices and points.

Without the script (in a mail program or a strict browser) the whole content is still readable.
"""

from autoshard._html.document import digest

SCRIPT = """
(() => {
  "use strict";
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const texts = new WeakMap();
  const text = (node) => {
    if (!texts.has(node)) texts.set(node, node.textContent.toLowerCase());
    return texts.get(node);
  };

  // Shows the rows that contain all words and the axis. Folded parts with such rows open during a search.
  const state = new Map();
  const filter = (place) => {
    const { words = [], axis = "", variant = "" } = state.get(place) || {};
    const on = words.length > 0 || axis !== "" || variant !== "";
    let shown = 0, count = 0;
    for (const row of all("tbody tr", place)) {
      const has = words.every((word) => text(row).includes(word)) && (!axis || row.querySelector("." + axis))
        && (!variant || row.classList.contains(variant));
      row.hidden = !has;
      count += 1;
      shown += has ? 1 : 0;
      const paths = all(".paths li", row);
      const hits = paths.filter((path) => words.every((word) => text(path).includes(word)));
      for (const path of paths) path.hidden = words.length > 0 && hits.length > 0 && !hits.includes(path);
    }
    for (const fold of all("details", place)) {
      if (fold.closest("tr")) continue;
      if (!("was" in fold.dataset)) fold.dataset.was = fold.open ? "1" : "";
      fold.open = on ? fold.querySelector("tbody tr:not([hidden])") !== null : fold.dataset.was === "1";
      if (!on) delete fold.dataset.was;
    }
    for (const field of all("input[data-for]")) {
      if (field.dataset.for === place.id) {
        field.parentNode.querySelector("output").textContent = on ? shown + " of " + count : "";
      }
    }
  };
  const change = (place, part) => {
    state.set(place, { ...(state.get(place) || {}), ...part });
    filter(place);
  };
  for (const field of all("input[data-for]")) {
    const place = document.getElementById(field.dataset.for);
    field.addEventListener("input", () => {
      change(place, { words: field.value.toLowerCase().split(/\\s+/).filter(Boolean) });
    });
  }
  const tensors = document.getElementById("tensors-list");
  const buttons = all("#axes-list button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of buttons) other.setAttribute("aria-pressed", String(on && other === button));
      if (tensors) change(tensors, { axis: on ? [...button.classList].find((c) => /^a[0-9]+$/.test(c)) : "" });
    });
  }
  for (const button of all("button[data-fold]")) {
    button.addEventListener("click", () => {
      const folds = all("#" + button.dataset.fold + " details").filter((fold) => !fold.closest("tr"));
      const open = folds.some((fold) => !fold.open);
      for (const fold of folds) fold.open = open;
    });
  }

  // The device under the pointer: its number, coordinates and position, and its group along each mesh axis.
  const device = document.getElementById("device");
  const panels = all(".planes").map((panel) => (
    { axis: panel.dataset.axis, dims: JSON.parse(panel.dataset.dims), rects: all("rect[data-d]", panel) }));
  const coordinates = (number, dims) => {
    const words = [];
    let rest = Number(number);
    for (const [name, size] of [...dims].reverse()) {
      words.unshift(name + " " + rest % size);
      rest = Math.floor(rest / size);
    }
    return words.length ? "coordinates " + words.join(", ") + "; " : "";
  };
  const point = (number) => {
    const groups = [], place = [];
    for (const { axis, rects } of panels) {
      const mine = rects.find((rect) => rect.dataset.d === number);
      if (!mine) continue;
      const group = rects.filter((rect) => rect.dataset.g === mine.dataset.g);
      for (const rect of rects) rect.classList.toggle("on", rect.dataset.g === mine.dataset.g);
      const numbers = group.map((rect) => rect.dataset.d);
      place.push(axis + " " + mine.dataset.p);
      groups.push("along " + axis + ": " + numbers.slice(0, 12).join(" ") + (numbers.length > 12 ? " \\u2026" : ""));
    }
    if (device) {
      device.textContent = "Device " + number + ": " + coordinates(number, panels[0].dims) + "mesh position "
        + place.join(", ") + ". Groups of devices " + groups.join("; ") + ".";
    }
  };
  for (const { rects } of panels) {
    for (const rect of rects) rect.addEventListener("pointerenter", () => point(rect.dataset.d));
  }

  // A link to a part that is folded opens it.
  const reveal = () => {
    const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = part && part.closest("details");
    if (fold && !fold.open) {
      fold.open = true;
      part.scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);
  reveal();

  // Details of a plan in the chart, and the filter by variant.
  const tip = document.getElementById("point");
  for (const dot of all(".plot .pt")) {
    dot.addEventListener("pointerenter", () => { if (tip) tip.textContent = dot.title; });
  }
  const variant = document.getElementById("variant");
  if (variant) {
    variant.addEventListener("change", () => {
      for (const dot of all(".plot .pt")) dot.hidden = variant.value !== "" && !dot.classList.contains(variant.value);
      change(document.getElementById("plans-list"), { variant: variant.value });
    });
  }
})();
"""

DIGEST = digest(SCRIPT)
