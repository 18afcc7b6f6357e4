// Draws the curves of a job with uPlot.
"use strict";
(() => {
  const section = document.getElementById("curves"), place = document.getElementById("charts");
  const note = document.getElementById("curves-note"), more = document.getElementById("curves-more");
  const rest = document.getElementById("curves-rest"), restPlace = document.getElementById("charts-rest");
  const FIRST = 6;  // curves that are always shown
  const plots = new Map();
  // `wanted`: the next load reads the pods' curves. `kept`: the page shows such curves. `said`: the note that came with
  // them.
  let wanted = false, kept = false, said = "", busy = false, last = 0;

  const { colour, figure, place: at, finite, isSteep, chart } = ddpjobCharts;

  function draw(curve, starts, repeated, first) {
    const known = plots.get(curve.title);
    if (known) { known.plot.destroy(); }
    const box = known ? known.box : document.createElement("div");
    const values = finite(curve.y), logarithmic = isSteep(curve.title, values);
    if (!known) {
      box.className = "chart";
      const title = document.createElement("h3"), name = document.createElement("span"), value = document.createElement("b");
      title.append(name, value);
      box.append(title);
      (first ? place : restPlace).append(box);
    }
    const [name, value] = box.firstChild.children;
    name.textContent = curve.title + (logarithmic ? ", logarithmic scale" : "");
    const shown = (number) => figure(curve.title, number);
    const now = () => { value.textContent = shown(values[values.length - 1]); };
    now();
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const plot = chart(box, {
      title: curve.title, lines: [{ ...curve, stroke: colour("--accent") }], by: "step", logarithmic, starts, repeated,
      label: `${curve.title} over ${values.length} points: now ${shown(values[values.length - 1])}, from ${shown(low)} to ${shown(high)}`,
      moved: (index) => {
        if (index === null || curve.y[index] === null) now();
        else value.textContent = `${at("step", curve.x[index])}: ${shown(curve.y[index])}`;
      },
    });
    plots.set(curve.title, { box, plot, curve, starts, repeated });
  }

  async function load() {
    if (busy) return;
    busy = true;
    const inPods = wanted;  // Each press of the button runs commands in pods only once.
    wanted = false;
    try {
      const answer = await fetch(section.dataset.path + (inPods ? "?pods=1" : ""));
      if (!answer.ok) throw new Error(answer.status);
      const found = await answer.json();
      if (inPods) { kept = !found.more; said = found.note; }
      for (const [title, { box, plot }] of plots)
        if (!found.curves.some((curve) => curve.title === title)) { plot.destroy(); box.remove(); plots.delete(title); }
      found.curves.forEach((curve, number) => {
        const known = plots.get(curve.title);
        const drawn = (one, marks) => JSON.stringify([one, marks.starts, marks.repeated]);
        if (!known || drawn(known.curve, known) !== drawn(curve, found)) draw(curve, found.starts, found.repeated, number < FIRST);
      });
      rest.hidden = found.curves.length <= FIRST;
      more.hidden = !found.more && !kept;
      more.textContent = kept ? "Read the steps from the pods again" : "Read earlier steps from the pods";
      const why = found.note || said;
      const lines = found.starts.length ? " Dashed lines mark where training continued after a restart; shaded steps were repeated." : "";
      note.textContent = found.curves.length
        ? `Over steps, from ${found.source}.${lines} ${why}`
        : `No curves: ${why || "this job has reported no steps"}.`;
    } catch {
      note.textContent = "The curves cannot be read at the moment.";
    } finally {
      busy = false;
      last = Date.now();
      more.disabled = wanted;
      if (wanted) load();
    }
  }

  more.addEventListener("click", () => { wanted = more.disabled = true; note.textContent = "Reading..."; load(); });
  // Curves from the pods stay until the next press, because they reach further back than reported values.
  document.addEventListener("ddpjob:refreshed", () => { if (!kept && Date.now() - last > 5000) load(); });
  const again = () => { for (const { curve, starts, repeated } of [...plots.values()]) draw(curve, starts, repeated); };
  rest.addEventListener("toggle", again);
  let waiting = 0;
  new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(again, 100); }).observe(section);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  load();
})();
