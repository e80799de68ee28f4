"""The script of a run's page: the values of all curves at the step under the pointer."""

SCRIPT = """
(() => {
  "use strict";
  const number = (x) => Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3)
    ? x.toExponential(3) : String(Number(x.toPrecision(5)));
  for (const plot of document.querySelectorAll(".plot[data-curves]")) {
    const curves = JSON.parse(plot.dataset.curves);
    const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
    const cross = plot.querySelector(".cross");
    const output = plot.closest(".chart").nextElementSibling.querySelector("output");
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const step = low + (high - low) * (event.clientX - box.left) / box.width;
      const words = [];
      let at = null;
      for (const [name, parts] of curves) {
        let best = null;
        for (const part of parts) {
          let a = 0, b = part.length - 1;
          while (a < b) {
            const middle = (a + b) >> 1;
            if (part[middle][0] < step) a = middle + 1; else b = middle;
          }
          for (const point of [part[a], part[Math.max(a - 1, 0)]]) {
            if (best === null || Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
          }
        }
        if (best === null) continue;
        if (at === null) at = best[0];
        words.push(name + " " + number(best[1]) + (best[0] === at ? "" : " (step " + best[0] + ")"));
      }
      if (at === null) return;
      cross.hidden = false;
      cross.style.left = Math.min(Math.max(100 * (at - low) / (high - low), 0), 100) + "%";
      output.textContent = "step " + at + ": " + words.join(", ");
    });
    plot.addEventListener("pointerleave", () => { cross.hidden = true; output.textContent = ""; });
  }
})();
"""
