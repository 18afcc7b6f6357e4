// Draws the curves of several jobs in the same charts, smoothed as the user chooses.
"use strict";
(() => {
  const { colour, figure, place, finite, isSteep, chart } = ddpjobCharts;
  const section = document.getElementById("curves"), charts = document.getElementById("charts");
  const note = document.getElementById("curves-note"), more = document.getElementById("curves-more");
  const controls = document.getElementById("controls");
  const { by, smooth, log } = controls.elements;
  const jobs = [...document.querySelectorAll("#key li[data-path]")].map((item, number) => (
    { number, path: item.dataset.path, name: item.dataset.name, found: null }));
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4]];  // so that jobs differ not only by colour
  const boxes = new Map();
  let inPods = false, busy = false, again = false, last = 0;

  // An exponential moving average without a bias towards the first value, as in TensorBoard.
  function smoothed(values, weight) {
    let mean = 0, sum = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = mean * weight + (1 - weight) * value;
      sum = sum * weight + (1 - weight);
      return mean / sum;
    });
  }

  function draw() {
    const titles = [];
    for (const { found } of jobs) for (const { title } of found?.curves ?? []) if (!titles.includes(title)) titles.push(title);
    for (const [title, { box, plot }] of boxes) if (!titles.includes(title)) { plot.destroy(); box.remove(); boxes.delete(title); }
    const weight = Number(smooth.value);
    for (const title of titles) {
      const curves = jobs.flatMap((job) => (job.found?.curves ?? []).filter((curve) => curve.title === title)
        .map((curve) => ({ job, curve })));
      drawOne(title, curves, title.startsWith("test ") ? 0 : weight);
    }
    const notes = jobs.map(({ name, found }) => {
      if (!found) return `${name}: its curves cannot be read at the moment`;
      if (!found.curves.length) return `${name}: no curves${found.note ? `: ${found.note}` : ""}`;
      return found.note ? `${name}: ${found.note}` : "";
    }).filter(Boolean);
    note.textContent = notes.length ? `${notes.join(". ")}.` : "Dashed vertical lines mark where training continued after a restart.";
    more.hidden = !inPods && !jobs.some(({ found }) => found?.more);
  }

  function drawOne(title, curves, weight) {
    let known = boxes.get(title);
    if (known) known.plot.destroy();
    else {
      const box = document.createElement("div"), head = document.createElement("h3"), values = document.createElement("p");
      box.className = "chart";
      values.className = "values";
      head.append(document.createElement("span"), document.createElement("b"));
      box.append(head, values);
      charts.append(box);
      known = { box, head, values };
    }
    const { box, head, values } = known;
    const all = curves.flatMap(({ curve }) => finite(curve.y));
    const logarithmic = log.value === "on" ? all.some((value) => value > 0) : log.value === "auto" && isSteep(title, all);
    const lines = curves.flatMap(({ job, curve }) => {
      const line = { x: curve.x, y: curve.y, stroke: colour(`--run-${job.number}`), dash: DASHES[job.number] };
      return weight ? [{ ...line, faint: true, width: 1 }, { ...line, y: smoothed(curve.y, weight) }] : [line];
    });
    const each = weight ? 2 : 1;
    head.firstChild.textContent = title + (logarithmic ? ", logarithmic scale" : "");
    // Shows each job's last value at or before the cursor or, without a cursor, its last value.
    const show = (index, data) => {
      head.lastChild.textContent = index === null ? "" : place(by.value, data[0][index]);
      values.replaceChildren(...curves.map(({ job, curve }, number) => {
        const column = data ? data[1 + number * each] : curve.y;
        let at = index === null ? column.length - 1 : index;
        while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
        const item = document.createElement("span");
        item.className = `run-${job.number}`;
        item.textContent = `${job.name} ${figure(title, column[at])}`;
        return item;
      }));
    };
    show(null, null);
    const ends = curves.map(({ job, curve }) => `${job.name} ends at ${figure(title, finite(curve.y).at(-1))}`);
    const starts = curves.length ? [...new Set(curves.flatMap(({ job }) => job.found.starts))] : [];
    known.plot = chart(box, { title, lines, by: by.value, logarithmic, starts, repeated: [], moved: show,
                              label: `${title} of ${curves.length} jobs: ${ends.join(", ")}` });
    box.append(values);
    boxes.set(title, known);
  }

  async function load() {
    if (busy) { again = true; return; }
    busy = true;
    const axis = by.value;
    await Promise.all(jobs.map(async (job) => {
      try {
        const answer = await fetch(`${job.path}/curves?by=${axis}${inPods ? "&pods=1" : ""}`);
        job.found = answer.ok ? await answer.json() : null;
      } catch { job.found = null; }
    }));
    busy = false;
    more.disabled = false;
    last = Date.now();
    if (again) { again = false; load(); return; }
    draw();
  }

  // The address contains the selection, so that users can share it.
  function remember() {
    const address = new URL(location.href);
    for (const field of [by, smooth, log]) address.searchParams.set(field.name, field.value);
    history.replaceState(null, "", address);
  }
  for (const field of [by, smooth, log]) {
    const given = new URL(location.href).searchParams.get(field.name);
    if (given && [...field.options].some((option) => option.value === given)) field.value = given;
  }
  by.addEventListener("change", () => { remember(); load(); });
  for (const field of [smooth, log]) field.addEventListener("change", () => { remember(); draw(); });
  controls.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { inPods = more.disabled = true; note.textContent = "Reading..."; load(); });
  document.addEventListener("ddpjob:refreshed", () => { if (!inPods && Date.now() - last > 5000) load(); });
  let waiting = 0;
  new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(() => { if (last) draw(); }, 100); }).observe(section);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  if (jobs.length) load();
})();
