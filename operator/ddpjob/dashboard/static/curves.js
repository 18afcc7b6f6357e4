// Draws the curves of a job with uPlot.
"use strict";
(() => {
  const section = document.getElementById("curves"), place = document.getElementById("charts");
  const note = document.getElementById("curves-note"), more = document.getElementById("curves-more");
  const rest = document.getElementById("curves-rest"), restPlace = document.getElementById("charts-rest");
  const FIRST = 6;  // curves that are always shown
  const plots = new Map();
  let wanted = false, kept = false, said = "", busy = false, last = 0;  // of the pods: to be read, drawn, their answer

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size >= 1e4) return Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  };

  // Vertical lines where training began again after a restart, and the stretches of steps that it repeated.
  const restarts = (starts, repeated) => (plot) => {
    const { ctx } = plot, { left, top, width, height } = plot.bbox;
    const inside = (x) => Math.min(Math.max(x, left), left + width);
    ctx.save();
    ctx.fillStyle = colour("--warn");
    ctx.globalAlpha = 0.2;
    for (const [since, made] of repeated) {
      const begin = inside(plot.valToPos(since, "x", true)), end = inside(plot.valToPos(made, "x", true));
      ctx.fillRect(begin, top, end - begin, height);
    }
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colour("--break");
    ctx.setLineDash([4, 4]);
    for (const step of starts) {
      const x = plot.valToPos(step, "x", true);
      if (x < left || x > left + width) continue;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
    ctx.restore();
  };

  function draw(curve, starts, repeated, first) {
    const known = plots.get(curve.title);
    if (known) { known.plot.destroy(); }
    const box = known ? known.box : document.createElement("div");
    const values = curve.y, low = Math.min(...values), high = Math.max(...values);
    const logarithmic = curve.title.includes("loss") && low > 0 && high > 20 * low;
    if (!known) {
      box.className = "chart";
      const title = document.createElement("h3"), name = document.createElement("span"), value = document.createElement("b");
      title.append(name, value);
      box.append(title);
      (first ? place : restPlace).append(box);
    }
    const [name, value] = box.firstChild.children;
    name.textContent = curve.title + (logarithmic ? ", logarithmic scale" : "");
    const now = () => { value.textContent = short(values[values.length - 1]); };
    now();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false },
                   font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: 170,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: false },
      axes: [
        { ...axis, values: (self, ticks) => ticks.map(short), space: 70, size: 26 },
        { ...axis, values: (self, ticks) => ticks.map(short), size: 52 },
      ],
      series: [{}, { stroke: colour("--accent"), width: 1.5, points: { show: values.length < 40, size: 4 } }],
      hooks: {
        draw: [restarts(starts, repeated)],
        setCursor: [(self) => {
          const at = self.cursor.idx;
          if (at === null || at === undefined) now();
          else value.textContent = `step ${curve.x[at]}: ${short(values[at])}`;
        }],
      },
    }, [curve.x, values], box);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label",
      `${curve.title} over ${values.length} points: now ${short(values[values.length - 1])}, from ${short(low)} to ${short(high)}`);
    plots.set(curve.title, { box, plot, curve, starts, repeated });
  }

  async function load() {
    if (busy) return;
    busy = true;
    const inPods = wanted;  // Each press of the button runs commands in pods, once.
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
      const lines = found.starts.length ? " Dashed lines: training began again after a restart; shaded: the steps that it repeated." : "";
      note.textContent = found.curves.length
        ? `Over steps, from ${found.source}.${lines} ${why}`
        : `No curves: ${why || "this job has reported no steps"}.`;
    } catch {
      note.textContent = "The curves cannot be read at present.";
    } finally {
      busy = false;
      last = Date.now();
      more.disabled = wanted;
      if (wanted) load();
    }
  }

  more.addEventListener("click", () => { wanted = more.disabled = true; note.textContent = "Reading..."; load(); });
  // What was read in the pods stays until the next press: it goes back further than what was reported.
  document.addEventListener("ddpjob:refreshed", () => { if (!kept && Date.now() - last > 5000) load(); });
  const again = () => { for (const { curve, starts, repeated } of [...plots.values()]) draw(curve, starts, repeated); };
  rest.addEventListener("toggle", again);
  let waiting = 0;
  new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(again, 100); }).observe(section);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  load();
})();
