// The keys n and p, and the two buttons, go through the tensors from the worst to the best.
const rows = [...document.querySelectorAll("tr[data-rank]")].sort((a, b) => a.dataset.rank - b.dataset.rank);
let at = -1;
function go(step) {
  if (!rows.length) return;
  rows[at]?.classList.remove("here");
  at = Math.min(Math.max(at + step, 0), rows.length - 1);
  rows[at].classList.add("here");
  rows[at].scrollIntoView({block: "center"});
  document.getElementById("where").textContent = `${at + 1} of ${rows.length}: ${rows[at].querySelector(".name").title}`;
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "n") go(1);
  if (event.key === "p") go(-1);
});
document.getElementById("next")?.addEventListener("click", () => go(1));
document.getElementById("before")?.addEventListener("click", () => go(-1));
