// Remembers the jobs chosen for a comparison, on all pages of the list, until the tab is closed.
"use strict";
(() => {
  const form = document.getElementById("compare");
  if (!form) return;  // With a single job, there is nothing to compare.
  const button = form.querySelector("button");
  const MOST = Number(form.dataset.most), KEY = "ddpjob:chosen";
  let chosen = new Set();
  try { chosen = new Set(JSON.parse(sessionStorage.getItem(KEY) || "[]").slice(0, MOST)); } catch { /* storage is off */ }

  function show() {
    for (const box of document.querySelectorAll("input[name=job]")) {
      box.checked = chosen.has(box.value);
      box.disabled = !box.checked && chosen.size >= MOST;
    }
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size ? `Compare ${chosen.size} job${chosen.size > 1 ? "s" : ""}` : "Compare jobs";
    try { sessionStorage.setItem(KEY, JSON.stringify([...chosen])); } catch { /* storage is off */ }
  }
  document.addEventListener("change", ({ target }) => {
    if (target.name !== "job") return;
    if (target.checked) chosen.add(target.value); else chosen.delete(target.value);
    show();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.href = `/compare?${new URLSearchParams([...chosen].map((job) => ["job", job]))}`;
  });
  document.addEventListener("ddpjob:refreshed", show);
  show();
})();
