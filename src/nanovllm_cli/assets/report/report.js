// Tooltips that show at once and under the keyboard's focus too. Without this script the browser's own ones are there.
"use strict";
const tip = document.getElementById("tip");
for (const mark of document.querySelectorAll(".mark")) {
  const words = mark.querySelector("title").textContent;
  const show = () => {
    const box = mark.querySelector(".shape, .bar").getBoundingClientRect();
    tip.textContent = words;
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const left = Math.max(8, Math.min(room, box.left + box.width / 2 - tip.offsetWidth / 2));
    const top = box.top > tip.offsetHeight + 12 ? box.top - tip.offsetHeight - 8 : box.bottom + 8;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${top + window.scrollY}px`;
  };
  const hide = () => { tip.hidden = true; };
  mark.addEventListener("pointerenter", () => { mark.querySelector("title")?.remove(); show(); });
  mark.addEventListener("pointerleave", hide);
  mark.addEventListener("focus", show);
  mark.addEventListener("blur", hide);
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
