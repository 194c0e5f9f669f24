// Tooltips that show at once, under the pointer and under the keyboard's focus; arrow keys go from mark to mark of a chart,
// Tab from chart to chart. Without this script the browser's own tooltips are there.
"use strict";
const tip = document.getElementById("tip");

function show(mark) {
  const box = mark.querySelector(".shape, .bar").getBoundingClientRect();
  tip.textContent = mark.getAttribute("aria-label");
  tip.hidden = false;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const left = Math.max(8, Math.min(room, box.left + box.width / 2 - tip.offsetWidth / 2));
  const top = box.top > tip.offsetHeight + 12 ? box.top - tip.offsetHeight - 8 : box.bottom + 8;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${top + window.scrollY}px`;
}

function hide() {
  tip.hidden = true;
}

for (const chart of document.querySelectorAll(".chart")) {
  const marks = [...chart.querySelectorAll(".mark")];
  marks.forEach((mark, i) => {
    mark.querySelector("title").remove();
    mark.setAttribute("tabindex", i ? "-1" : "0");
    mark.addEventListener("pointerenter", () => show(mark));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => show(mark));
    mark.addEventListener("blur", hide);
    mark.addEventListener("keydown", (event) => {
      const next = marks[i + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0)];
      if (!next || next === mark) return;
      event.preventDefault();
      mark.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
});
