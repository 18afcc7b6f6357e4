// Draws charts with uPlot, for a job's page and for the comparison of jobs.
"use strict";
const ddpjobCharts = (() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size >= 1e4) return Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value);
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  };
  // Each quantity has the same unit everywhere. Accuracy is in percent, as in the list and in the terminal.
  const figure = (title, value) => (title.endsWith("accuracy") && value !== null && value !== undefined && Math.abs(value) <= 1
    ? `${(100 * value).toFixed(2)}%` : short(value));
  const seconds = (value) => (value < 120 ? `${short(value)} s` : value < 7200 ? `${short(value / 60)} min` : `${short(value / 3600)} h`);
  const place = (by, value) => (by === "time" ? seconds(value) : `${by} ${short(value)}`);

  // A null separates two stretches: training was interrupted in between, so no line joins them.
  const finite = (values) => values.filter((value) => value !== null && value !== undefined);
  // Isolated points, which a line would not show.
  const alone = (values) => values.flatMap((value, at) => {
    const known = (other) => values[other] !== null && values[other] !== undefined;
    return known(at) && !known(at - 1) && !known(at + 1) ? [at] : [];
  });
  const isSteep = (title, values) => title.includes("loss") && Math.min(...values) > 0 && Math.max(...values) > 20 * Math.min(...values);

  // Draws vertical lines where training continued after a restart, and shades the repeated steps.
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

  // `lines`: [{x, y, stroke, width, dash, faint}]. `moved` gets the cursor's index in `data`, or null.
  function chart(box, { title, lines, by, logarithmic, starts, repeated, moved, label }) {
    const shown = lines.map(({ x, y }) => [x, logarithmic ? y.map((value) => (value > 0 ? value : null)) : y]);
    const data = shown.length === 1 ? shown[0] : uPlot.join(shown);
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false },
                   font: "11px system-ui, sans-serif" };
    const across = (ticks) => ticks.map((tick) => (by === "time" ? seconds(tick) : short(tick)));
    const plot = new uPlot({
      width: Math.max(200, box.clientWidth), height: 170,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: false },
      axes: [
        { ...axis, values: (self, ticks) => across(ticks), space: 70, size: 26 },
        { ...axis, values: (self, ticks) => ticks.map((tick) => figure(title, tick)), size: 56 },
      ],
      series: [{}, ...lines.map(({ y, stroke, width, dash, faint }) => ({
        stroke, width: width ?? 1.5, dash, alpha: faint ? 0.3 : 1,
        points: { show: !faint && finite(y).length < 40, size: 4, filter: (self, at, show) => (faint || show ? null : alone(self.data[at])) },
      }))],
      hooks: {
        draw: [restarts(starts, repeated)],
        setCursor: [(self) => moved(self.cursor.idx ?? null, self.data)],
      },
    }, data, box);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", label);
    return plot;
  }

  return { colour, short, figure, place, finite, isSteep, chart };
})();
