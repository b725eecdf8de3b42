"use strict";
const byId = id => document.getElementById(id);
const share = x => (Math.round(1000 * x) / 10 + 0).toFixed(1) + "\u00a0%";
const seconds = x => x === null ? "–" : x >= 1 ? x.toFixed(2) + " s" : x >= 0.001 ? (1000 * x).toPrecision(3) + " ms" : Math.round(1e6 * x) + " µs";
const escape = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}[c]));

const tip = byId("tip");
function showTip(event, html) {
  tip.innerHTML = html; tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
const hideTip = () => { tip.style.display = "none"; };
